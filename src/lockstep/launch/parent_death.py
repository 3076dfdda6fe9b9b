"""Binding of a process to its parent, so that the process ends when its parent does.

As a script, this module binds its process to an agent and then runs a rank in the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PARENT = "LOCKSTEP_PARENT"
"""Environment variable with the process that a rank must not outlive."""
PROCESS = "LOCKSTEP_PROCESS"
"""Environment variable with the process id of a rank that an agent started. Its child processes have other ids."""
_PR_SET_PDEATHSIG = 1


def prctl() -> Callable[..., int] | None:
    """Return the C function ``prctl`` of the system. Return None on systems other than Linux.

    Call it before a fork: a forked child should do as little as possible.
    """
    return ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def bind(prctl: Callable[..., int]) -> None:
    """Let the system kill this process when the thread that started it ends. Pass the result of :func:`prctl`."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends. Do nothing on systems other than Linux.

    A parent may be killed at any moment. A rank that outlived it would wait in a collective forever, and keep its port
    and its device.

    Args:
        parent: the process that started the ranks. A process that it did not start itself, such as a loader worker of a
            rank, is left alone while the parent lives.
    """
    found = prctl()
    if found is None:
        return
    if os.getppid() == parent:
        bind(found)
    if os.getppid() != parent and not is_alive(parent):
        os._exit(1)  # the parent ended before the call


def rank_preparation() -> Callable[[], None]:
    """Return the function that a new rank calls first. It creates a process group, and binds the rank to this process.

    The system watches the thread that starts the rank. That thread must not end before the process.
    """
    found, parent = prctl(), os.getpid()

    def start() -> None:
        os.setpgid(0, 0)
        # a background process may write to its terminal
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        _end_with_starter(found, parent)

    return start


def become(parent: int, command: list[str]) -> None:
    """Run ``command`` in place of this process, and let the system kill it when the process ``parent`` ends.

    An agent may be killed at any moment, and its ranks would continue without it. The binding is in place before the
    first line of the script, whatever the script imports. There is none on systems other than Linux.
    """
    _end_with_starter(prctl(), parent)
    os.environ[PROCESS] = str(os.getpid())
    os.execv(command[0], command)


def _end_with_starter(prctl: Callable[..., int] | None, parent: int) -> None:
    if prctl is not None:
        bind(prctl)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)


def is_alive(process: int) -> bool:
    """Return True if the process exists, even if it belongs to another user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as another user's process
        return True
    return True


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
