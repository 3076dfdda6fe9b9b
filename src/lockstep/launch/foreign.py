"""A process that somebody else started, watched: when it ends, and how as far as the system tells."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

PERIOD = 0.05
"""Seconds from one look to the next, where the system cannot tell of an end by itself."""


class Foreign:
    """Such a process.

    Args:
        pid: its id.
        said: called once it has ended and the system does not tell its exit code: what it said that this would be.

    Attributes:
        returncode: as of ``Popen``; None while it runs, and where it has ended and nobody can tell how.
    """

    def __init__(self, pid: int, said: Callable[[], int | None] = lambda: None) -> None:
        self.pid = pid
        self._said = said
        self.returncode: int | None = None
        self._is_parent = os.getppid() == pid
        self._ended = False
        self._descriptor: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # other systems, and Linux before 5.3
            self._descriptor = os.pidfd_open(pid)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end; whether it has come."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if self._descriptor is not None:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                gone = bool(poll.poll(None if left is None else left * 1000))
            else:
                gone = not self._is_there()
            if gone:
                code = _exit_code(self.pid)  # at once: it is forgotten when its parent has asked
                self.returncode = self._said() if code is None else code
                self._ended = True
            elif left == 0:
                return False
            elif self._descriptor is None:
                time.sleep(PERIOD if left is None else min(PERIOD, left))
        return True

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        with contextlib.suppress(OSError):  # it has ended
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif not self._ended:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_there(self) -> bool:
        if self._is_parent:
            return os.getppid() == self.pid
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _exit_code(pid: int) -> int | None:
    """How a process ended, as long as its parent has not asked; else None."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    if fields[0] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))
