"""How ranks come to a supervisor: bound to it when it starts them, or through a door when somebody else has."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def bond() -> Callable[[], None]:
    """What a started rank does first: be in a group of its own, and end with this process.

    The bond is to the thread that starts it, which has to be one that does not end before the process.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    parent = os.getpid()

    def bind() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal's background may write to it
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return bind


def door(name: str) -> socket.socket | None:
    """Where the ranks of this machine find a supervisor: a name in the system's memory, no file.

    Returns:
        None on another system than Linux, and where somebody has the name.
    """
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind("\0" + name)
        made.listen(1024)
        return made
    except OSError:
        return None


def caller(connection: socket.socket) -> int:
    """The process at the other end, if it is this user's; else 0."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return int(process) if user == os.getuid() else 0
