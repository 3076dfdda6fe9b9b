"""The end of a call: module and optimizer states go back to the CPU, and the device's memory is free again."""

from __future__ import annotations

import contextlib

from lockstep.engines.optimizer_states import states_to_cpu
from lockstep.engines.strategy import Strategy
from lockstep.ground.memory_use import empty_cache
from lockstep.ground.types import TrainerStatus
from lockstep.loop.session import Session


def leave_device(session: Session) -> None:
    """Bring what the call had on its device back to the CPU, unless a failure forbids it.

    Where one of several ranks has failed, the device may wait for a collective that never ends. In one process the
    device may be what failed; then the first error is the one to be raised.
    """
    strategy = session.strategy
    failed = session.state.status is TrainerStatus.INTERRUPTED and session.interruption is None
    if not failed:
        _leave(strategy)
    elif strategy.world_size == 1:
        with contextlib.suppress(RuntimeError):
            _leave(strategy)


def _leave(strategy: Strategy) -> None:
    """Gradients are dropped on the way; a run on the CPU keeps them."""
    module, device = strategy.module, strategy.root_device
    if module is None:  # the call ended before it was set up
        return
    if device.type != "cpu":
        for parameter in strategy.named_parameters().values():
            parameter.grad = None
    if not strategy.places_first:
        module.cpu()
        for optimizer in strategy.optimizers:
            states_to_cpu(optimizer)
    empty_cache(device)
