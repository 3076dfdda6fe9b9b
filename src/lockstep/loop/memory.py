"""Measurement of a run's memory use, for ``trainer.memory()``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch import Tensor

from lockstep.data.window import Window
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import has_compiled
from lockstep.ground.rank import log
from lockstep.loop.session import Session
from lockstep.loop.step import Step
from lockstep.memory.meter import Activations, MemoryUse


def memory_of(session: Session) -> MemoryUse:
    """Return this rank's current memory use by kind; after a fit, the memory use when the fit ended.

    Raises:
        MisconfigurationException: no call of the Trainer has set up a module.
    """
    strategy = session.strategy
    # a fit's buckets are released at its end, so a count after it would miss them
    if session.state.stage is None and session.memory_at_end is not None:
        return session.memory_at_end
    if strategy.module is None:
        raise MisconfigurationException(
            "trainer.memory(): no module has been set up yet; call it during or after trainer.fit() or an evaluation."
        )
    return MemoryUse.of(
        strategy.held(), rank=strategy.world.rank, device=strategy.root_device.type, activations=session.activations
    )


def activations_counter(session: Session) -> Activations | None:
    """Return a counter of the memory of the module's activations, or None if that memory cannot be measured."""

    def gathered() -> list[Tensor]:
        return session.strategy.held().get("gathered", [])

    # compiled code saves its activations past torch's hooks, and threads of several devices would mix their counts
    compiled = session.module._compiler_ctx is not None or has_compiled(session.module)
    return None if compiled or session.strategy.drives_all_devices else Activations(session.module, gathered)


NOTABLE_MEMORY = 2**26
"""Memory use on a CPU, in bytes, below which the report has the level DEBUG."""


def watch_first_window(session: Session, step: Step) -> None:
    """Measure the activations of a fit's first forward, and report memory use after the first window.

    Args:
        session: stores the measurement as ``activations``.
        step: the `Step` of the fit, after set-up.
    """
    session.memory_at_end = session.activations = None
    activations = activations_counter(session)
    play, own = step.window, step.training_step

    def first(window: Window, batch_idx: int) -> Iterator[None]:
        step.window = play  # type: ignore[method-assign]  # first of all: later windows cost nothing
        yield from play(window, batch_idx)
        if activations is not None:
            activations.end()
        used = memory_of(session)
        if used.device != "cpu" or used.total >= NOTABLE_MEMORY:
            session.report(used.line())
        elif session.is_global_zero:
            log.debug(used.line())

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


def store_memory_use(session: Session) -> None:
    """Store the memory use at the end of a fit, before the gradient buckets are released."""
    if session.fitting and session.activations is not None:
        session.memory_at_end = memory_of(session)
