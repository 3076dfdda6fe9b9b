"""The system ends a process when the one that started it ends. As a script this sees to the command of a rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PARENT = "LOCKSTEP_PARENT"
"""The variable with the process that a rank must not outlive."""
PROCESS = "LOCKSTEP_PROCESS"
"""The variable with the process that an agent has started as a rank, and not what that starts in turn."""
_PR_SET_PDEATHSIG = 1


def prctl() -> Callable[..., int] | None:
    """The system's ``prctl``, which asks for it; None on systems other than Linux. To be found before a fork: a child
    should do as little as it can."""
    return ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def bind(prctl: Callable[..., int]) -> None:
    """Have the system kill this process when the thread that started it ends; ``prctl`` as :func:`prctl` gives it."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends (on Linux; elsewhere this does nothing).

    A parent may be killed at any moment. A rank that outlived it would wait in a collective for ever, and
    hold its port and its device.

    Args:
        parent: the process that started the ranks. A process that it did not start itself, a loader worker
            of a rank say, is left alone as long as it lives.
    """
    found = prctl()
    if found is None:
        return
    if os.getppid() == parent:
        bind(found)
    if os.getppid() != parent and not is_alive(parent):
        os._exit(1)  # it ended before that was asked for


def bound() -> Callable[[], None]:
    """What a started rank does first: be in a group of its own, and end with this process.

    What counts is the end of the thread that starts it, which has to be one that does not end before the process.
    """
    found, parent = prctl(), os.getpid()

    def begin() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal's background may write to it
        _end_with_starter(found, parent)

    return begin


def become(parent: int, command: list[str]) -> None:
    """Replace this process by ``command``, which the system kills when the process ``parent`` ends.

    An agent may be killed at any moment, and its ranks would go on without it. This holds from before the first
    line of the script, whatever the script imports. On systems other than Linux there is none.
    """
    _end_with_starter(prctl(), parent)
    os.environ[PROCESS] = str(os.getpid())
    os.execv(command[0], command)


def _end_with_starter(prctl: Callable[..., int] | None, parent: int) -> None:
    if prctl is not None:
        bind(prctl)
        if os.getppid() != parent:  # it ended before that was asked for
            os._exit(1)


def is_alive(process: int) -> bool:
    """Whether there is such a process, whosever it is."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is somebody else's
        return True
    return True


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
