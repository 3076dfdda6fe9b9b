"""What torch's ``fully_shard`` keeps of a module, read alike from each release of torch that is supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def groups_of_state(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together, of an ``FSDPState``: before torch 2.12 at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        return [] if group is None else [group]
    return list(groups)


def groups_of(part: FSDPModule) -> list[Any]:
    """The groups of parameters of a module on which ``fully_shard`` was called."""
    return groups_of_state(part._get_fsdp_state())


# -- gradients of gathered parameters themselves, where `.grad` is that of the shard: see `gathered_parameter` ---

_RAW_GRADIENT: Any = torch.Tensor.grad


def own_gradient(gathered: Tensor) -> Tensor | None:
    """The gradient that backwards of this rank have left in a gathered parameter."""
    gradient: Tensor | None = _RAW_GRADIENT.__get__(gathered)
    return gradient


def set_own_gradient(gathered: Tensor, gradient: Tensor | None) -> None:
    """Put one there, or take it away."""
    _RAW_GRADIENT.__set__(gathered, gradient)


ACCUMULATED = (
    "Parameter {name!r} has a hook of register_post_accumulate_grad_hook, and under fsdp no rank accumulates the whole "
    "gradient of all samples: look at `.grad` in `on_after_backward`, where it is this rank's shard of that."
)


def refuse_accumulated(name: str, parameter: Tensor) -> None:
    """Refuse a hook that would be given a gradient of this rank's samples, or none."""
    if parameter._post_accumulate_grad_hooks:
        raise MisconfigurationException(ACCUMULATED.format(name=name))


# -- whole gradients that wait for a reduction: beside the parameter, and since torch 2.15 its own ------------


def waiting_gradient(param: FSDPParam) -> Tensor | None:
    """The whole gradient that backwards without reduction have left for a parameter."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    gathered = getattr(param, "_unsharded_param", None)
    return None if gathered is None else own_gradient(gathered)


def set_waiting_gradient(param: FSDPParam, gradient: Tensor | None) -> None:
    """Put one there, or take it away; the parameter has been gathered before."""
    gathered = getattr(param, "_unsharded_param", None)
    beside = not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property)
    if beside:
        param.unsharded_accumulated_grad = None
    if gathered is None:
        return
    set_own_gradient(gathered, None)
    if gradient is None:
        return
    if not beside:
        set_own_gradient(gathered, gradient.to(gathered.grad_dtype or gathered.dtype))
    elif gradient.dtype == gathered.dtype:
        set_own_gradient(gathered, gradient)
    else:
        param.unsharded_accumulated_grad = gradient


# -- gradients of what a rank has not used --------------------------------------------------------------------


def reduce_unused_parameters(part: FSDPModule) -> None:
    """Let a rank whose samples did not use a parameter bring zeros to the reduction of its gradient.

    Without that its reduce-scatter is smaller than those of the other ranks. torch has a switch for it since 2.13.
    """
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of(part):
        vars(group)["post_backward"] = _Filled(group)


class _Filled:
    """The end of a group's backward, before which each parameter that has no gradient gets one of zeros."""

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
        gathered = getattr(param, "_unsharded_param", None)  # there after the first forward that used it
        if gathered is None or not gathered.requires_grad:
            return
        if waiting_gradient(param) is None:
            set_own_gradient(gathered, torch.zeros_like(gathered))
