"""A process asks another one where it is: that one writes the stack of its main thread into a file that both have."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import IO, Any, TypeAlias

from lockstep.ground.installed import STACK
from lockstep.supervise.mailbox import file_without_a_name
from lockstep.supervise.stack import Stack, dumped

SECONDS = 1.0
"""How long an answer may take."""

ASK: int | None = int(signal.SIGRTMIN) + 9 if sys.platform.startswith("linux") else None
"""The signal that asks; `faulthandler` answers it at once, also while the rank waits in a collective."""

HEADER = "Stack (most recent call first):\n"
"""Before each answer, by `faulthandler` too."""

PROMPT = 0.5
"""Seconds in which the thread answers, unless it cannot."""

Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

_file: IO[bytes] | None = None
_where: Callable[[], tuple[str, int]] | None = None
_bell: tuple[int, int] = (0, -1)
"""The process in which a thread answers, and the descriptor of the pipe's end into which others write."""


def offer() -> str:
    """Let other processes ask for the stack of this one's main thread.

    Returns:
        where the answers will lie, and where to ask: what :func:`ask` wants to know. "" where a system cannot do that.
    """
    global _file, _bell
    if ASK is None:
        return ""
    if _file is None:
        _file = file_without_a_name("lockstep-stack")  # open as long as this process lives
        STACK.install(_register)
    if _bell[0] != os.getpid():  # a forked process has the descriptors, and not the thread
        ear, mouth = os.pipe()
        _bell = os.getpid(), mouth
        threading.Thread(target=_attend, args=(ear, _file), name="lockstep-sample", daemon=True).start()
    locations = (_file.fileno(), _bell[1])
    path = f"/proc/{os.getpid()}/fd"
    return (
        f"{path}/{locations[0]}:{os.fstat(locations[0]).st_ino}:{path}/{locations[1]}:{os.fstat(locations[1]).st_ino}"
    )


def _register() -> Callable[[], object]:
    assert ASK is not None
    assert _file is not None
    # At the end of a process faulthandler puts back what was there before: who is asked then shall not die of it.
    before = _change_handler(ASK, signal.SIG_IGN)
    faulthandler.register(ASK, file=_file, all_threads=False, chain=False)
    return partial(_unregister, ASK, before)


def _unregister(number: int, before: Handler) -> None:
    faulthandler.unregister(number)
    if before is not None:
        _change_handler(number, before)


def _change_handler(number: int, handler: Handler) -> Handler:
    """The handler that was there; only a main thread can change it."""
    with suppress(ValueError):
        return signal.signal(number, handler)
    return None


def _attend(ear: int, file: IO[bytes]) -> None:
    """In a thread: write down where the main thread is, whenever somebody asks."""
    main = threading.main_thread().ident
    while os.read(ear, 4096):
        frame = None if main is None else sys._current_frames().get(main)
        lines = [HEADER, _batch()]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
        del frame  # which would keep what it refers to
        with suppress(OSError):
            os.write(file.fileno(), "".join(lines).encode(errors="replace"))


def _batch() -> str:
    """The line that says in which hook this process is, and at which batch."""
    with suppress(Exception):  # it may come between any two lines of anybody's
        if _where is not None:
            phase, batch = _where()
            return f"  Batch {batch} in {phase}\n"
    return ""


def answer_with(where: Callable[[], tuple[str, int]] | None) -> None:
    """Let answers begin with the hook and the batch that ``where`` gives, in the thread that answers; None: with
    neither."""
    global _where
    _where = where


def is_there(answers: str) -> bool:
    """Whether the process that made an :func:`offer` still runs; its id may be somebody else's by now."""
    return bool(answers) and _is_file(*answers.split(":")[:2])


def _is_file(path: str, inode: str = "") -> bool:
    try:
        return str(os.stat(path).st_ino) == inode
    except OSError:
        return False


def ask(process: int, answers: str, by_signal: bool = False) -> Stack | None:
    """The stack of a process that made an :func:`offer`; None if it does not answer.

    Args:
        process: its id.
        answers: what its offer returned.
        by_signal: whether no thread can answer there: it was forked from the process that made the offer.
    """
    if ASK is None or not is_there(answers):
        return None
    try:
        with _answering(answers) as answer:
            if not by_signal and _ring(*answers.split(":")[2:]):
                found = answer(PROMPT)
                if found is not None:
                    return found
            os.kill(process, ASK)
            return answer()
    except OSError:  # it has ended
        return None


def ask_workers(process: int, answers: str) -> list[Stack]:
    """The stacks of a process' children that it has forked after its :func:`offer`: workers of a loader."""
    found = []
    for child in _children(process):
        if ASK is not None and _handles(child, ASK):
            stack = ask(child, answers, by_signal=True)
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


def _ring(path: str = "", inode: str = "") -> bool:
    """Wake the thread that answers; whether there may be one."""
    if not _is_file(path, inode):
        return False
    try:
        bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(bell, b"?") == 1
    except OSError:  # nobody has taken in what came before
        return False
    finally:
        os.close(bell)


@contextmanager
def _answering(answers: str) -> Iterator[Callable[..., Stack | None]]:
    """Inside, the function that is given reads what a process writes that is asked after this began."""
    with open(answers.partition(":")[0], "rb") as file:
        file.seek(0, os.SEEK_END)
        yield lambda seconds=SECONDS: _answer(file, seconds)


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


def _answer(file: IO[bytes], seconds: float) -> Stack | None:
    text, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        more = file.read()
        if text and not more:
            answers = text.decode(errors="replace").split(HEADER)  # a signal lets the thread answer, too
            return dumped(next((each for each in answers if each.strip()), ""))
        text += more
    return None
