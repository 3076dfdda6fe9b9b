"""Signals to a rank: a handler that notes which, and does nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.launch.inherit import PARENT

ENDED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM has ended."""


@contextmanager
def heeding(numbers: Iterable[int], note: Callable[[int], None]) -> Iterator[None]:
    """Have ``note`` called for these signals. Outside the main thread nothing is changed.

    A handler that the user has set stays, as does what a parent told this process to ignore. Forked processes, loader
    workers say, take no notice: a cluster signals them too, and the run could not come to its boundary without them.

    Args:
        numbers: the signals.
        note: called in the handler, so it must not print: the next signal may strike while it does.
    """
    process = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process:
            note(number)

    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)


def is_under_lockstep(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether lockstep started this process as a rank beside its own: it sends SIGTERM only after a failure."""
    return environ.get(PARENT) == str(os.getppid())


def end_at_once() -> None:
    """End this process as an unhandled SIGTERM does; for handlers."""
    os._exit(ENDED)


@contextmanager
def unheeded(number: int) -> Iterator[None]:
    """Inside, a signal does what the system does by itself: SIGTERM ends this process, also inside a collective."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


def send_again(number: int) -> None:
    """Send a signal that nobody has acted on to this process once more, now that nobody heeds it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.kill(os.getpid(), number)
