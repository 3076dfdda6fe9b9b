"""The ways to train on two ranks that are compared: containers with their communication hooks and averagers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

NONE = "plain"
TORCH = "torch's DDP"
NO_FEEDBACK = "PowerSGD, rank 4, no error feedback"
HOOKS = [NONE, "fp16", "bf16", "PowerSGD, rank 4", NO_FEEDBACK, "local SGD", "DiLoCo"]
FEEDBACK = HOOKS[3]
PERIOD = 16
"""Local steps between two averages."""


@dataclass
class Method:
    """A container, what follows an optimizer's step, and what the hook keeps."""

    runner: nn.Module
    after: Callable[[], Any]
    state: Any
    period: int


def nothing() -> None:
    """Follows a step with which all is done."""


def register(runner: nn.Module, hook: str, start: int) -> Any:
    """Give one of our containers ``hook``; returns its state.

    Args:
        runner: `lockstep.DistributedDataParallel`.
        hook: of `HOOKS`.
        start: plain rounds before PowerSGD.
    """
    from lockstep.extensions.parallel import hooks

    if hook == NONE:
        return None
    state: Any = None
    function: Any = getattr(hooks, hook, None)
    if hook.startswith("PowerSGD"):
        function = hooks.power_sgd
        state = hooks.PowerSGDState(rank=4, start=start, min_compression_rate=1, error_feedback=hook != NO_FEEDBACK)
    elif hook in ("local SGD", "DiLoCo"):
        function = hooks.post_local_sgd
        state = hooks.PostLocalSGDState(start=0, local_allreduce=False)
    runner.register_comm_hook(state, function)  # type: ignore[operator]
    return state


def make(method: str, model: nn.Module, start: int = 2) -> Method:
    """``model`` on this rank by ``method``: one of `HOOKS` in our container over TCP, or torch's container."""
    if method == TORCH:
        return Method(TorchDDP(model, gradient_as_bucket_view=True), nothing, None, 1)
    from lockstep.extensions.parallel.averaging import OuterOptimizer, ParameterAverager
    from lockstep.extensions.parallel.container import DistributedDataParallel

    runner = DistributedDataParallel(model, shared_memory=False)
    state = register(runner, method, start)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    after: Callable[[], Any] = nothing
    if method == "local SGD":
        after = ParameterAverager(parameters, period=PERIOD, start=PERIOD - 1).step
    elif method == "DiLoCo":
        after = OuterOptimizer(parameters, period=PERIOD).step
    return Method(runner, after, state, 1 if after is nothing else PERIOD)


def step(method: Method, optimizer: torch.optim.Optimizer, loss: Callable[..., Any], data: Any) -> Any:
    """One training step; gives its loss."""
    optimizer.zero_grad()
    found = loss(method.runner, data)
    found.backward()
    optimizer.step()
    method.after()
    return found
