"""Which optimizers are to be given a closure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer


def takes_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` is to be given the closure: one that is neither torch's nor ours may need it,
    though its signature says ``closure=None`` or ``**kwargs``."""
    step = inspect.unwrap(type(optimizer).step)
    package = (step.__module__ or "torch").partition(".")[0]  # a mock in the place of one of torch's has none
    return package not in ("torch", "lockstep") and ("closure" in _parameters(optimizer) or may_ignore(optimizer))


def demands_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` cannot be called without a closure, as LBFGS's."""
    closure = _parameters(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def may_ignore(optimizer: Optimizer) -> bool:
    """Return True for a step with ``**kwargs`` and no ``closure``, which may pass the closure on or ignore it."""
    parameters = _parameters(optimizer)
    return "closure" not in parameters and any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _parameters(optimizer: Optimizer) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(optimizer).step)).parameters


class PlayedFirst:
    """A closure that has run before the step: its first call gives that loss, if weights and gradients are unchanged.

    So an optimizer that passes its closure on and one that ignores it both step with the gradients of the window.

    Args:
        closure: is called at once, and again by each later call.
        optimizer: whose weights and gradients are watched.

    Attributes:
        loss: what the closure returned.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: Optimizer) -> None:
        self.loss = closure()
        self._closure, self._optimizer = closure, optimizer
        self._before: list[tuple[int, ...]] | None = self._versions()

    def __call__(self) -> Any:
        is_known, self._before = self._before is not None and self._before == self._versions(), None
        if not is_known:
            self.loss = self._closure()
        return self.loss

    def _versions(self) -> list[tuple[int, ...]]:
        """Return numbers for each weight and gradient that change when they are written to."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        found = ((each._version, each.grad) for each in parameters)
        return [(version,) if grad is None else (version, id(grad), grad._version) for version, grad in found]
