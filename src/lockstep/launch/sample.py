"""The stack of another rank, asked for from outside: a rank pays nothing until somebody asks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from lockstep.launch.stack import Stack, dumped

SECONDS = 1.0
"""How long an answer may take."""

ASK: int | None = int(signal.SIGRTMIN) + 9 if sys.platform.startswith("linux") else None
"""The signal that asks; `faulthandler` answers it at once, also while the rank waits in a collective."""

TELL: int | None = None if ASK is None else ASK - 1
"""The signal that asks for what only Python can say; a rank answers it as soon as it runs Python or sleeps there."""

_file: IO[bytes] | None = None


def offer() -> str:
    """Let other processes ask for the stack of this one's main thread.

    Returns:
        where the answers will lie: what :func:`ask` wants to know. "" where a system cannot do that.
    """
    global _file
    if ASK is None:
        return ""
    if _file is None:
        _file = tempfile.TemporaryFile(prefix="lockstep-")  # noqa: SIM115, open as long as this process lives
        faulthandler.register(ASK, file=_file, all_threads=False, chain=False)
    return f"/proc/{os.getpid()}/fd/{_file.fileno()}:{os.fstat(_file.fileno()).st_ino}"


def answer_by(say: Callable[[], None] | None) -> None:
    """Let ``say`` be called when another process wants this one to `speak`; None: let nothing happen then."""
    if TELL is None or threading.current_thread() is not threading.main_thread():
        return
    if say is None:
        signal.signal(TELL, signal.SIG_IGN)  # not the default, which would end this process
    else:
        answer = say
        signal.signal(TELL, lambda number, frame: answer())
        signal.siginterrupt(TELL, False)


def speak(process: int) -> None:
    """Have a process call what it gave to `answer_by`, if it can."""
    if TELL is not None and _handles(process, TELL):
        with suppress(OSError):
            os.kill(process, TELL)


def is_there(answers: str) -> bool:
    """Whether the process that made an :func:`offer` still runs; its id may be somebody else's by now."""
    path, _, inode = answers.partition(":")
    try:
        return bool(path) and str(os.stat(path).st_ino) == inode
    except OSError:
        return False


def ask(process: int, answers: str) -> Stack | None:
    """The stack of a process that made an :func:`offer`; None if it does not answer.

    Args:
        process: its id.
        answers: what its offer returned.
    """
    if ASK is None or not is_there(answers):
        return None
    try:
        with _answering(answers) as answer:
            os.kill(process, ASK)
            return answer()
    except OSError:  # it has ended
        return None


def ask_workers(process: int, answers: str) -> list[Stack]:
    """The stacks of a process' children that it has forked after its :func:`offer`: workers of a loader."""
    found = []
    for child in _children(process):
        if ASK is not None and _handles(child, ASK):
            stack = ask(child, answers)
            if stack is not None:
                found.append(stack)
    return found


def ask_stopped(process: int, answers: str) -> Stack | None:
    """The stack of a process that somebody has stopped. It goes on then, after it has answered."""
    if ASK is None or not is_there(answers):
        return None
    import ctypes

    library = ctypes.CDLL(None)
    try:
        with _answering(answers) as answer:
            # to its main thread: a signal to the whole process that is stopped may get lost
            if not hasattr(library, "tgkill") or library.tgkill(process, process, ASK):
                os.kill(process, ASK)
            os.kill(process, signal.SIGCONT)
            return answer()
    except OSError:
        return None


@contextmanager
def _answering(answers: str) -> Iterator[Callable[[], Stack | None]]:
    """Inside, the function that is given reads what a process writes that is asked after this began."""
    with open(answers.partition(":")[0], "rb") as file:
        file.seek(0, os.SEEK_END)
        yield lambda: _answer(file)


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal: this one would end a process that has none."""
    with suppress(OSError, StopIteration), open(f"/proc/{process}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _answer(file: IO[bytes]) -> Stack | None:
    text, until = b"", time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(0.02)
        more = file.read()
        if text and not more:
            return dumped(text.decode(errors="replace"))
        text += more
    return None
