"""Access to the internals of torch's ``fully_shard`` in every supported release of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def groups_of_state(state: Any) -> list[Any]:
    """Return the groups of an ``FSDPState``: parameters that are gathered together. Before torch 2.12 at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        return [] if group is None else [group]
    return list(groups)


def groups_of(part: FSDPModule) -> list[Any]:
    """Return the parameter groups of a module on which ``fully_shard`` was called."""
    return groups_of_state(part._get_fsdp_state())


# -- the own gradients of gathered parameters, whose `.grad` is the shard's: see `gathered_parameter` ------------

_RAW_GRADIENT: Any = torch.Tensor.grad


def own_gradient(gathered: Tensor) -> Tensor | None:
    """Return the gradient that this rank's backwards have left in a gathered parameter."""
    gradient: Tensor | None = _RAW_GRADIENT.__get__(gathered)
    return gradient


def set_own_gradient(gathered: Tensor, gradient: Tensor | None) -> None:
    """Set or remove that gradient."""
    _RAW_GRADIENT.__set__(gathered, gradient)


ACCUMULATED = (
    "Parameter {name!r} has a hook of register_post_accumulate_grad_hook, and under fsdp no rank accumulates the whole "
    "gradient of all samples: look at `.grad` in `on_after_backward`, where it is this rank's shard of that."
)


def refuse_accumulated(name: str, parameter: Tensor) -> None:
    """Refuse a hook that would get a gradient of this rank's samples only, or none."""
    if parameter._post_accumulate_grad_hooks:
        raise MisconfigurationException(ACCUMULATED.format(name=name))


# -- whole gradients that wait for a reduction: in an attribute, or since torch 2.15 in the parameter's own `.grad` ---


def waiting_gradient(param: FSDPParam) -> Tensor | None:
    """Return the whole gradient that backwards without reduction have left for a parameter."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    gathered = getattr(param, "_unsharded_param", None)
    return None if gathered is None else own_gradient(gathered)


def set_waiting_gradient(param: FSDPParam, gradient: Tensor | None) -> None:
    """Set or remove that gradient. The parameter must have been gathered before."""
    gathered = getattr(param, "_unsharded_param", None)
    is_attribute = not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property)
    if is_attribute:
        param.unsharded_accumulated_grad = None
    if gathered is None:
        return
    set_own_gradient(gathered, None)
    if gradient is None:
        return
    if not is_attribute:
        set_own_gradient(gathered, gradient.to(gathered.grad_dtype or gathered.dtype))
    elif gradient.dtype == gathered.dtype:
        set_own_gradient(gathered, gradient)
    else:  # `.grad` accepts only the parameter's dtype
        param.unsharded_accumulated_grad = gradient


# -- gradients of parameters that a rank has not used -----------------------------------------------------------


def reduce_unused_parameters(part: FSDPModule) -> None:
    """Make a rank contribute zeros to the reduction of a gradient if its samples did not use the parameter.

    Otherwise its reduce-scatter is smaller than those of the other ranks. torch has a switch for it since 2.13.
    """
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of(part):
        vars(group)["post_backward"] = _Filled(group)


class _Filled:
    """Replacement for a group's post_backward: each parameter without a gradient first gets one of zeros."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._post_backward = group.post_backward

    def __call__(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            for param in self._group.fsdp_params:
                self._fill(param)
        self._post_backward(*unused)

    @staticmethod
    def _fill(param: FSDPParam) -> None:
        gathered = getattr(param, "_unsharded_param", None)  # exists after the first forward that used it
        if gathered is None or not gathered.requires_grad:
            return
        if waiting_gradient(param) is None:
            set_own_gradient(gathered, torch.zeros_like(gathered))
