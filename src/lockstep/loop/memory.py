"""The uses of a run's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor

from lockstep.data.window import Window
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import has_compiled
from lockstep.loop.session import Session
from lockstep.loop.step import Step
from lockstep.memory.meter import Activations, MemoryUse


def memory_of(session: Session) -> MemoryUse:
    """Return the uses of this rank's memory; after a fit, those at its end.

    Raises:
        MisconfigurationException: no call of the Trainer has set up a module.
    """
    strategy = session.strategy
    if session.state.stage is None and session.used is not None:
        return session.used
    if strategy.module is None:
        raise MisconfigurationException(
            "trainer.memory(): no module has been set up; call it in or after trainer.fit() or an evaluation."
        )
    return MemoryUse.of(
        strategy.held(), rank=strategy.world.rank, device=strategy.root_device.type, activations=session.activations
    )


def countable(session: Session) -> Activations | None:
    """Return a counter for the activations of this session's module; None if they cannot be observed.

    That is so in compiled modules, and if one process drives several devices in threads.
    """

    def gathered() -> list[Tensor]:
        return session.strategy.held().get("gathered", [])

    compiled = session.module._compiler_ctx is not None or has_compiled(session.module)
    return None if compiled or session.strategy.drives_all_devices else Activations(session.module, gathered)


def watch_first_window(session: Session, step: Step, told: Callable[[], None]) -> None:
    """Count the activations that the first forward of a fit keeps; later forwards are not changed.

    Args:
        session: stores the count.
        step: the fit's step, set up.
        told: called after the first window.
    """
    session.used = session.activations = None
    activations = countable(session)
    way, own = step.window, step.training_step

    def first(window: Window, batch_idx: int) -> Iterator[None]:
        step.window = way  # type: ignore[method-assign]
        yield from way(window, batch_idx)
        if activations is not None:
            activations.end()
        told()

    @wraps(own)
    def counting(*args: Any, **kwargs: Any) -> Any:
        step.training_step = own
        if activations is None or session.activations is not None:
            return own(*args, **kwargs)
        session.activations = activations
        activations.samples = float(session.results.weight) or None
        with activations.counting():
            return own(*args, **kwargs)

    step.window = first  # type: ignore[method-assign]
    if activations is not None:
        step.training_step = counting


def keep(session: Session) -> None:
    """Keep the uses of memory at the end of a fit, before its buckets are released."""
    if session.fitting and session.activations is not None:
        session.used = memory_of(session)
