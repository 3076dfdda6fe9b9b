"""Signal handlers of a rank, and the handling of Ctrl-C."""

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

# -- handlers ------------------------------------------------------------------------------------------------


ENDED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended."""


HANDLED = [getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TSTP")]
"""Signals that a supervisor handles. The starting process blocks them until the handlers are installed."""

_giving_way: list[object] = []
"""Handlers of :func:`handling` that a nested one may replace."""


@contextmanager
def handling(
    numbers: Iterable[int], callback: Callable[[int], None], is_replaceable: bool = False, shared: Collection[int] = ()
) -> Iterator[None]:
    """Call ``callback`` when one of the given signals arrives inside the context. Do nothing outside the main thread.

    A handler that the user has set remains. ``callback`` is then called only for signals in ``shared``, after the
    user's handler. A signal that a parent process set to be ignored stays ignored. Forked processes such
    as loader workers ignore these signals, because a cluster sends them to every process, and without its workers the
    run could not reach its boundary.

    Args:
        numbers: the signals.
        callback: called in the handler. It must not print, because another signal may interrupt it.
        is_replaceable: whether a fit inside the context may take over these signals while it runs.
        shared: signals for which the user's handler and ``callback`` are called.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        users = before.get(number)
        try:
            if callable(users) and users not in replaceable:
                users(number, frame)
        finally:
            if os.getpid() == process:
                callback(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    replaceable = (signal.SIG_DFL, *_giving_way)
    users = {number for number in shared if callable(before.get(number)) and before[number] is not signal.SIG_IGN}
    replaced = {n: handler for n, handler in before.items() if handler in replaceable or n in users}
    for number in replaced:
        signal.signal(number, handle)
    if is_replaceable:
        _giving_way.append(handle)
    try:
        with HANDLERS.inside():
            yield
    finally:
        if is_replaceable:
            _giving_way.remove(handle)
        for number, handler in replaced.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def is_under_lockstep(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if lockstep started this process as a rank. Such ranks receive SIGTERM only after a failure."""
    return environ.get(PARENT) == str(os.getppid())


def end_at_once() -> None:
    """End this process at once, like an unhandled SIGTERM. Call this in signal handlers."""
    os._exit(ENDED)


@contextmanager
def by_default(number: int) -> Iterator[None]:
    """Restore a signal's default action inside the context. SIGTERM then ends this process even in a collective."""
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
    """Let Ctrl-C and SIGTERM end this process at once inside the context, even while it waits for other ranks.

    A signal that is ignored, or handled outside of Python, is left alone.
    """
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                stack.enter_context(by_default(number))
        yield


def send_again(number: int) -> None:
    """Send a signal to this process again after handlers have been removed, so that its default action runs."""
    for stream in (sys.stdout, sys.stderr):
        # the reader is gone, or the stream is missing
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os.kill(os.getpid(), number)


# -- Ctrl-C --------------------------------------------------------------------------------------------------


PASS: int | None = int(signal.SIGRTMIN) + 10 if sys.platform.startswith("linux") else None
"""Signal that passes on a Ctrl-C. It is not SIGINT, which a rank may also get from the terminal and count twice."""


def accept_ctrl_c() -> None:
    """From now on, accept a Ctrl-C that another process sends by :func:`pass_on`.

    Such a Ctrl-C has an effect only inside :func:`interruptible`.
    """
    if PASS is not None and _in_main_thread() and signal.getsignal(PASS) is signal.SIG_DFL:
        number = PASS

        def ignore() -> Callable[[], object]:
            # by default, the signal would end a process that is not in an interruptible call
            signal.signal(number, signal.SIG_IGN)
            return functools.partial(signal.signal, number, signal.SIG_DFL)

        PASSED_ON.install(ignore)


def pass_on(process: int) -> None:
    """Pass a Ctrl-C on to a process that has called :func:`accept_ctrl_c`. Repeated calls count once."""
    if PASS is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, PASS)


@contextmanager
def interruptible(ask: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``ask`` at the first Ctrl-C, to request a stop. At the second, call ``end`` and raise KeyboardInterrupt.

    A handler that the script has set is called first. An ignored Ctrl-C stays ignored, as in a process that a shell
    script started in the background: it is meant for another process.

    Forked loader workers ignore Ctrl-C. A terminal sends it to them, too, and without them the run could not reach
    its boundary. Outside the main thread, do nothing.
    """
    if not _in_main_thread():
        yield
        return
    process, presses = os.getpid(), 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        # a forked process: a loader worker, or one of the user's
        if os.getpid() != process:
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

    found = signal.getsignal(signal.SIGINT)
    defaults = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, *_asking)
    users = found if callable(found) and found not in defaults else None
    numbers = [number for number in (signal.SIGINT, PASS) if number is not None]
    if found is signal.SIG_IGN:
        numbers.remove(signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    _asking.append(handle)
    for number in before:
        signal.signal(number, handle)
    try:
        with HANDLERS.inside():
            yield
    finally:
        _asking.remove(handle)
        for number, handler in before.items():
            # the script may have set another handler meanwhile
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


_asking: list[object] = []
"""Installed handlers of :func:`interruptible`."""


class SignalPipe:
    """Pipe into which this process' signals are written, even while its main thread waits in a collective.

    Python runs handlers in the main thread between two instructions, so never while that thread waits for another rank.
    The C-level handler writes the signal's number into a pipe at once.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Write signals to the pipe inside the context. Do nothing outside the main thread, or under an event loop."""
        if not _in_main_thread():
            yield
            return
        # a forked process must not report its signals as this process' own
        FORK_WAKEUP.at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _in_main_thread() else None)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # set by an event loop
            signal.set_wakeup_fd(before)
            yield
            return
        self.presses()  # drops earlier ones
        try:
            with WAKEUP.inside():
                yield
        finally:
            signal.set_wakeup_fd(-1)

    def fileno(self) -> int:
        """Return the descriptor for ``select``. It is readable when a signal has arrived."""
        return self._read

    def presses(self) -> int:
        """Return how many times Ctrl-C has been pressed since the last call of this method."""
        try:
            return os.read(self._read, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    def wake(self) -> None:
        """Make :meth:`fileno` readable, to wake the thread that waits for it."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
