"""Signals to a rank: noted, and Ctrl-C heard once."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import current_process
from types import FrameType
from typing import Any

from lockstep.ground.installed import FORK_WAKEUP, HANDLERS, PASSED_ON, WAKEUP
from lockstep.launch.parent_death import PARENT

# -- signals, noted ------------------------------------------------------------------------------------------


ENDED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM has ended."""


HANDLED = [getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TSTP")]
"""Signals for which a supervisor has handlers; its starter blocks them until these are in place."""

_giving_way: list[object] = []
"""The handlers of :func:`handling` that one inside of them may replace."""


@contextmanager
def handling(
    numbers: Iterable[int], note: Callable[[int], None], gives_way: bool = False, beside: Collection[int] = ()
) -> Iterator[None]:
    """Have ``note`` called for these signals. Outside the main thread nothing is changed.

    A handler that the user has set stays, alone or ``beside`` the note, as does what a parent told this process to
    ignore. Forked processes, loader workers say, take no notice: a cluster signals them too, and the run could not come
    to its boundary without them.

    Args:
        numbers: the signals.
        note: called in the handler, so it must not print: the next signal may strike while it does.
        gives_way: whether a fit that begins inside takes these signals over for its time.
        beside: signals for which the user's handler is called, and ``note`` after it.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        users = before.get(number)
        try:
            if callable(users) and users not in replaceable:
                users(number, frame)
        finally:
            if os.getpid() == process:
                note(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    replaceable = (signal.SIG_DFL, *_giving_way)
    users = {number for number in beside if callable(before.get(number)) and before[number] is not signal.SIG_IGN}
    taken = {n: handler for n, handler in before.items() if handler in replaceable or n in users}
    for number in taken:
        signal.signal(number, handle)
    if gives_way:
        _giving_way.append(handle)
    try:
        with HANDLERS.inside():
            yield
    finally:
        if gives_way:
            _giving_way.remove(handle)
        for number, handler in taken.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def is_under_lockstep(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether lockstep started this process as a rank beside its own: it sends SIGTERM only after a failure."""
    return environ.get(PARENT) == str(os.getppid())


def end_at_once() -> None:
    """End this process as an unhandled SIGTERM does; for handlers."""
    os._exit(ENDED)


@contextmanager
def by_default(number: int) -> Iterator[None]:
    """Inside, a signal does what the system does by itself: SIGTERM ends this process, also inside a collective."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end this process at once, also where its main thread waits for other ranks.

    A signal that this process ignores, or that a handler outside of Python has, is left alone.
    """
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                stack.enter_context(by_default(number))
        yield


def send_again(number: int) -> None:
    """Send a signal that nobody has acted on to this process once more, now that nobody heeds it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more, or there is none
            stream.flush()
    os.kill(os.getpid(), number)


# -- Ctrl-C --------------------------------------------------------------------------------------------------


PASS: int | None = int(signal.SIGRTMIN) + 10 if sys.platform.startswith("linux") else None
"""The signal by which a Ctrl-C is passed on. Not SIGINT: a rank that the terminal told too would count two."""


def hear() -> None:
    """From here on a Ctrl-C may be passed on to this process; it has no effect outside :func:`interruptible`."""
    if PASS is not None and _in_main_thread() and signal.getsignal(PASS) is signal.SIG_DFL:
        PASSED_ON.install(_ignore_passed)


def _ignore_passed() -> Callable[[], object] | None:
    if PASS is None:
        return None
    signal.signal(PASS, signal.SIG_IGN)
    return functools.partial(signal.signal, PASS, signal.SIG_DFL)


def pass_on(process: int) -> None:
    """Tell a process that has called :func:`hear` of a Ctrl-C; more than once is as once."""
    if PASS is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, PASS)


@contextmanager
def interruptible(ask: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C call ``ask``; the second one calls ``end`` and raises where it strikes.

    A handler that the script has set is called first. A Ctrl-C that is ignored, as by what a shell's script has started
    in the background, stays so: the user means another process.

    Loader workers that are forked meanwhile take no notice: a terminal tells them too, and the run could not come
    to its boundary without them. Outside the main thread nothing is changed.
    """
    if not _in_main_thread():
        yield
        return
    process, presses = os.getpid(), 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        if os.getpid() != process:  # a process that was forked here: a loader worker, or one of the user's own
            if current_process().daemon:
                return
            raise KeyboardInterrupt
        if number == signal.SIGINT and users is not None:
            users(number, frame)
        presses += number == signal.SIGINT
        if presses > 1:
            end()
            raise KeyboardInterrupt
        ask()

    users = _users_of_ctrl_c()
    before = {number: signal.getsignal(number) for number in _heard_of_ctrl_c()}
    _asking.append(handle)
    for number in before:
        signal.signal(number, handle)
    try:
        with HANDLERS.inside():
            yield
    finally:
        _asking.remove(handle)
        for number, handler in before.items():
            if signal.getsignal(number) is handle:  # else the script has set one meanwhile
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


_asking: list[object] = []
"""The handlers of :func:`interruptible` that are in place."""


def _heard_of_ctrl_c() -> list[int]:
    """The signals that tell of a Ctrl-C: SIGINT, unless it is ignored, and that of :func:`pass_on`."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    heard = (None if ignored else int(signal.SIGINT), PASS)
    return [number for number in heard if number is not None]


def _users_of_ctrl_c() -> Callable[[int, FrameType | None], Any] | None:
    """The handler of Ctrl-C that the script has set; None where it has set none."""
    found = signal.getsignal(signal.SIGINT)
    if not callable(found) or found in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, *_asking):
        return None
    return found


class SignalPipe:
    """Hears of every Ctrl-C to this process, also while its main thread waits in a collective.

    Python runs handlers in the main thread between two of its instructions, so one that waits for another rank
    never comes to them. The system's own handler writes the signal's number into a pipe at once.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen, in the main thread; elsewhere, and where somebody else listens, this does nothing."""
        if not _in_main_thread():
            yield
            return
        # a process that is forked here must not report what it hears as if it were this one
        FORK_WAKEUP.at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _in_main_thread() else None)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            yield
            return
        self.heard()
        try:
            with WAKEUP.inside():
                yield
        finally:
            signal.set_wakeup_fd(-1)

    def fileno(self) -> int:
        """For ``select``: readable when there is something to hear."""
        return self._read

    def heard(self) -> int:
        """How often Ctrl-C was pressed since the last time."""
        try:
            return os.read(self._read, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    def wake(self) -> None:
        """Make :meth:`fileno` readable."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._read)
        os.close(self._write)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
