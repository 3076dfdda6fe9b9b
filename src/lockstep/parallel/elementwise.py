"""Which optimizers may work on slices of parameters: those that treat each element by itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Torch's optimizers whose update of an element depends on nothing but that element's value, gradient and state."""

WHOLE = {
    "LBFGS": "its line search works on all parameters together",
    "Muon": "it orthogonalises each matrix as a whole",
    "Adafactor": "it keeps row and column sums of each matrix",
    "SparseAdam": "it updates the rows that a sparse gradient names",
}
"""Torch's other optimizers, and why a slice of a parameter is not enough for them."""

_WAY_OUT = (
    "leave it unsharded (shard_optimizer=False); or, where its update of an element depends on that element's "
    "value, gradient and state alone, declare its class by `lockstep.parallel.elementwise.elementwise`"
)

_declared: set[type] = set()

Kind = TypeVar("Kind", bound=type)


def elementwise(kind: Kind) -> Kind:
    """Declare a class of optimizers as elementwise, so that its work may be split; usable as a decorator.

    Its update of an element must depend on nothing but that element's value, gradient and state, and on numbers
    that are the same for the whole parameter (a count of steps). State tensors must have the parameter's shape or
    no dimension. Norms of a parameter (LARS, LAMB), factored statistics and line searches do not qualify.

    Example::

        @elementwise
        class Lion(torch.optim.Optimizer): ...
    """
    _declared.add(kind)
    return kind


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clip the gradients of ``parameters``, in place; of a complex one its real and its imaginary part."""
    real: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_complex():  # for which torch has no clamp
            torch.view_as_real(parameter.grad).clamp_(-value, value)
        else:
            real.append(parameter)
    if real:  # torch refuses none, and a window may be without a loss
        torch.nn.utils.clip_grad_value_(real, value)


def concerned(parameters: Iterable[Tensor], optimizers: Iterable[Any]) -> list[Any]:
    """Those of ``optimizers`` that have some of ``parameters``."""
    own = {id(parameter) for parameter in parameters}
    return [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]


def check_elementwise(optimizers: Iterable[Any]) -> None:
    """Make sure that every optimizer may work on slices.

    Raises:
        ValueError: with the class of the first one that may not, the reason and the way out.
    """
    for optimizer in optimizers:
        if not _is_elementwise(type(optimizer)):
            name = type(optimizer).__name__
            reason = WHOLE.get(name, "it is not known to treat each element of a parameter by itself")
            raise ValueError(f"a sharded optimizer cannot be {name}: {reason}; {_WAY_OUT}")
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                raise ValueError(
                    f"a sharded optimizer cannot be {type(optimizer).__name__}(differentiable=True): a graph does not "
                    "lead through slices that other ranks update; leave it unsharded (shard_optimizer=False)"
                )


def _is_elementwise(kind: type) -> bool:
    if kind in _declared or kind in ELEMENTWISE:
        return True
    # a subclass that brings nothing of its own into the update
    for base in ELEMENTWISE:
        if issubclass(kind, base):
            names = ("step", "_init_group")
            return all(_function(kind, name) is _function(base, name) for name in names)
    return False


def _function(kind: type, name: str) -> Any:
    # torch wraps the `step` of each class for its profiler when one is first made
    return inspect.unwrap(getattr(kind, name))
