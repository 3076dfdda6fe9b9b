"""Requests for the stack of another process. That process writes its stack to a file that both processes have open."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, TypeAlias

from lockstep.ground.installed import STACK
from lockstep.supervise.mailbox import file_without_a_name
from lockstep.supervise.stack import Stack, parse_stack

SECONDS = 1.0
"""Seconds that a reply may take."""

ASK: int | None = int(signal.SIGRTMIN) + 9 if sys.platform.startswith("linux") else None
"""Signal that requests a stack. `faulthandler` answers it at once, even while the rank waits in a collective."""

HEADER = "Stack (most recent call first):\n"
"""First line of each reply, by the replying thread or by `faulthandler`."""

PROMPT = 0.5
"""Seconds in which the replying thread is expected to reply."""

Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

_file: IO[bytes] | None = None
_where: Callable[[], tuple[str, int]] | None = None
_wake_pipe: tuple[int, int] = (0, -1)
"""The process with a replying thread, and the writing end of the pipe that wakes the thread."""


def offer() -> str:
    """Let other processes request the stack of this process' main thread.

    Returns:
        the address for :func:`ask`, with the file for replies and the pipe. "" on systems without support.
    """
    global _file, _wake_pipe
    if ASK is None:
        return ""
    if _file is None:
        # stays open until this process ends
        _file = file_without_a_name("lockstep-stack")
        number, file = ASK, _file

        def register() -> Callable[[], object]:
            # At exit, faulthandler restores the previous handler. A request that arrives then must not end the process.
            before = _change_handler(number, signal.SIG_IGN)
            faulthandler.register(number, file=file, all_threads=False, chain=False)

            def unregister() -> None:
                faulthandler.unregister(number)
                if before is not None:
                    _change_handler(number, before)

            return unregister

        STACK.install(register)
    # a forked process inherits the descriptors, but not the thread
    if _wake_pipe[0] != os.getpid():
        read_end, write_end = os.pipe()
        _wake_pipe = os.getpid(), write_end
        threading.Thread(target=_reply_to_requests, args=(read_end, _file), name="lockstep-sample", daemon=True).start()
    locations = (_file.fileno(), _wake_pipe[1])
    path = f"/proc/{os.getpid()}/fd"
    return (
        f"{path}/{locations[0]}:{os.fstat(locations[0]).st_ino}:{path}/{locations[1]}:{os.fstat(locations[1]).st_ino}"
    )


def _change_handler(number: int, handler: Handler) -> Handler:
    """Set a signal's handler and return the previous handler. Outside the main thread, do nothing and return None."""
    with suppress(ValueError):
        return signal.signal(number, handler)
    return None


def _reply_to_requests(read_end: int, file: IO[bytes]) -> None:
    """Write the main thread's stack to ``file`` at each request from ``read_end``. Runs in a separate thread."""
    main = threading.main_thread().ident
    while os.read(read_end, 4096):
        frame = None if main is None else sys._current_frames().get(main)
        lines = [HEADER, _batch()]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
        del frame  # it would keep objects alive
        with suppress(OSError):
            os.write(file.fileno(), "".join(lines).encode(errors="replace"))


def _batch() -> str:
    """Return this process' current hook and batch as a line for a reply; "" if they are unknown."""
    with suppress(Exception):  # it may run between any two lines of other code
        if _where is not None:
            phase, batch = _where()
            return f"  Batch {batch} in {phase}\n"
    return ""


def set_phase_source(where: Callable[[], tuple[str, int]] | None) -> None:
    """Set the function that returns the current hook and batch, which replies include. None removes the function."""
    global _where
    _where = where


def is_there(answers: str) -> bool:
    """Return True if the process that made an :func:`offer` still runs.

    The result is False if another process has received its id since.
    """
    return bool(answers) and _is_file(*answers.split(":")[:2])


def _is_file(path: str, inode: str = "") -> bool:
    try:
        return str(os.stat(path).st_ino) == inode
    except OSError:
        return False


def ask(process: int, answers: str, by_signal: bool = False) -> Stack | None:
    """Return the stack of a process that made an :func:`offer`, or None if the process does not reply.

    Args:
        process: id of the process.
        answers: return value of its offer.
        by_signal: whether the process has no replying thread, because it is a fork of the process that made the offer.
    """
    if ASK is None or not is_there(answers):
        return None
    try:
        with _reading_replies(answers) as read_reply:
            if not by_signal and _wake_thread(*answers.split(":")[2:]):
                found = read_reply(PROMPT)
                if found is not None:
                    return found
            os.kill(process, ASK)
            return read_reply()
    except OSError:  # the process has ended
        return None


def ask_workers(process: int, answers: str) -> list[Stack]:
    """Return the stacks of a process' loader workers, which inherited its :func:`offer` when they were forked."""
    children: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    found = []
    for child in children:
        if ASK is not None and _handles(child, ASK):
            stack = ask(child, answers, by_signal=True)
            if stack is not None:
                found.append(stack)
    return found


def ask_stopped(process: int, answers: str) -> Stack | None:
    """Return the stack of a stopped process. The process continues after its reply."""
    if ASK is None or not is_there(answers):
        return None
    import ctypes

    library = ctypes.CDLL(None)
    try:
        with _reading_replies(answers) as read_reply:
            # to its main thread: a signal to the whole stopped process may be lost
            if not hasattr(library, "tgkill") or library.tgkill(process, process, ASK):
                os.kill(process, ASK)
            os.kill(process, signal.SIGCONT)
            return read_reply()
    except OSError:
        return None


def _wake_thread(path: str = "", inode: str = "") -> bool:
    """Request a stack by waking the reply thread of a process. Return False if the thread cannot be reached."""
    if not _is_file(path, inode):
        return False
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(pipe, b"?") == 1
    except OSError:  # the pipe is full: earlier requests were not read
        return False
    finally:
        os.close(pipe)


@contextmanager
def _reading_replies(answers: str) -> Iterator[Callable[..., Stack | None]]:
    """Yield a function that reads the reply to a request. Make the request inside the context."""
    with open(answers.partition(":")[0], "rb") as file:
        file.seek(0, os.SEEK_END)
        yield lambda seconds=SECONDS: _read_reply(file, seconds)


def _handles(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal that would otherwise end the process."""
    with suppress(OSError, StopIteration), open(f"/proc/{process}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _read_reply(file: IO[bytes], seconds: float) -> Stack | None:
    text, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        more = file.read()
        if text and not more:
            # a signal also wakes the thread
            answers = text.decode(errors="replace").split(HEADER)
            return parse_stack(next((each for each in answers if each.strip()), ""))
        text += more
    return None
