"""The stack of another rank, asked for from outside: a rank pays nothing until somebody asks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
from typing import IO

from lockstep.launch.stack import Stack, dumped

SECONDS = 1.0
"""How long an answer may take."""

ASK: int | None = int(signal.SIGRTMIN) + 9 if sys.platform.startswith("linux") else None
"""The signal that asks; `faulthandler` answers it at once, also while the rank waits in a collective."""

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
        with open(answers.partition(":")[0], "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(process, ASK)
            return _answer(file)
    except OSError:  # it has ended
        return None


def _answer(file: IO[bytes]) -> Stack | None:
    text, until = b"", time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(0.02)
        more = file.read()
        if text and not more:
            return dumped(text.decode(errors="replace"))
        text += more
    return None
