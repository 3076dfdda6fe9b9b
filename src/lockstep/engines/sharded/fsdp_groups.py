"""Access to internals of torch's ``fully_shard`` that works with every supported release of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def groups_of_state(state: Any) -> list[Any]:
    """Return an ``FSDPState``'s groups of parameters that are gathered together (at most one before torch 2.12)."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        return [] if group is None else [group]
    return list(groups)


def groups_of(part: FSDPModule) -> list[Any]:
    """Return the parameter groups of a module on which ``fully_shard`` was called."""
    return groups_of_state(part._get_fsdp_state())


# -- this rank's gradients of gathered parameters, whose `.grad` is the shard's: see `gathered_parameter` ---------

_RAW_GRADIENT: Any = torch.Tensor.grad


def own_gradient(gathered: Tensor) -> Tensor | None:
    """Return the gradient that this rank's backwards have accumulated in a gathered parameter, or None."""
    gradient: Tensor | None = _RAW_GRADIENT.__get__(gathered)
    return gradient


def set_own_gradient(gathered: Tensor, gradient: Tensor | None) -> None:
    """Set or remove the gradient that `own_gradient` returns."""
    _RAW_GRADIENT.__set__(gathered, gradient)


ACCUMULATED = (
    "Parameter {name!r} has a register_post_accumulate_grad_hook, but with fsdp no rank accumulates the full gradient. "
    "Instead, read `.grad` in `on_after_backward`, where it is this rank's shard of the reduced gradient."
)


def refuse_accumulated(name: str, parameter: Tensor) -> None:
    """Raise if a parameter has a post-accumulate-grad hook, since the hook would not receive the full gradient."""
    if parameter._post_accumulate_grad_hooks:
        raise MisconfigurationException(ACCUMULATED.format(name=name))


# -- unsharded gradients before a reduction: in an attribute, or since torch 2.15 in the parameter's own `.grad` ---


def waiting_gradient(param: FSDPParam) -> Tensor | None:
    """Return a parameter's unsharded gradient that is accumulated but not yet reduced; None if there is none."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    gathered = getattr(param, "_unsharded_param", None)
    return None if gathered is None else own_gradient(gathered)


def set_waiting_gradient(param: FSDPParam, gradient: Tensor | None) -> None:
    """Set or remove the gradient that `waiting_gradient` returns. The parameter must have been gathered before."""
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
    """Make each rank reduce zero gradients for the parameters that its samples did not use.

    Otherwise the ranks' reduce-scatters would have different sizes. torch has a switch for this since 2.13.
    """
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of(part):
        vars(group)["post_backward"] = _Filled(group)


class _Filled:
    """Replacement for a group's post_backward that first creates zeros for parameters without a gradient."""

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
