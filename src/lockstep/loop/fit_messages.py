"""Log messages of every fit, on rank 0, to the logger ``lockstep``: its start, its memory, the reason of its end.

They have level INFO if the progress bar, the model's summary or a logger is on. If a user has switched off all three,
as in a study of many fits, they have level DEBUG.
"""

from __future__ import annotations

import logging
import os

from lockstep.callbacks.model_summary import ModelSummary
from lockstep.ground.rank import log
from lockstep.loop.session import Session
from lockstep.memory.meter import MemoryUse


def say(session: Session, text: str) -> None:
    """Log one of the messages of every fit."""
    if session.is_global_zero:
        log.log(logging.INFO if _is_watched(session) else logging.DEBUG, text)


NOTABLE_MEMORY = 2**26
"""Bytes on a CPU below which memory is logged at level DEBUG."""


def say_memory(session: Session, used: MemoryUse) -> None:
    """Log the uses of memory; little memory on a CPU at level DEBUG."""
    if used.device != "cpu" or used.total >= NOTABLE_MEMORY:
        say(session, used.line())
    elif session.is_global_zero:
        log.debug(used.line())


def say_start(session: Session) -> None:
    """Log one line: devices, strategy, precision, and the folder of the run's files."""
    strategy, world = session.strategy, session.strategy.world
    devices = f"{world.size} x {strategy.root_device.type}"
    if world.num_nodes > 1:
        devices += f" on {world.num_nodes} nodes"
    say(session, f"trainer.fit: {devices}, {type(strategy).__name__}, {strategy.precision.name}, {_folder(session)}")


def _folder(session: Session) -> str:
    folders = [getattr(logger, "log_dir", None) for logger in session.loggers[:1]]
    folders += [getattr(callback, "dirpath", None) for callback in session.checkpoint_callbacks]
    folder = next(filter(None, folders), None)
    return "no files" if folder is None else f"files in {os.fspath(folder)}"


def _is_watched(session: Session) -> bool:
    bar = session.progress_bar
    summary = any(isinstance(callback, ModelSummary) for callback in session.callbacks)
    return bool(session.loggers) or summary or (bar is not None and bar.is_enabled)
