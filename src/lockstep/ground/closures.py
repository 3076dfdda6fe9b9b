"""Which optimizers are to be given a closure."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` is to be given the closure: one that is neither torch's nor ours may need it, though
    its signature says ``closure=None``."""
    step = inspect.unwrap(type(optimizer).step)
    package = (step.__module__ or "torch").partition(".")[0]  # a mock in the place of one of torch's has none
    return package not in ("torch", "lockstep") and "closure" in inspect.signature(step).parameters


def demands_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` cannot be called without a closure, as LBFGS's."""
    parameters = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is closure.empty
