"""Lock for processes on several nodes: a symbolic link that names the process that holds the lock.

If this process is dead, another one takes over the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from functools import cache

LONGEST_PAUSE = 0.05
"""Seconds, at most, between two attempts to take a lock."""


class FileLock:
    """Lock on a file for processes on several nodes. The lock is a symbolic link that names its holder.

    Optuna's own tools lock the journal with the same link. The lock of a dead process is taken over at once on the same
    host. A lock from another host is taken over when it has not changed for `grace` seconds.

    Args:
        path: path of the locked file, which exists.
        suffix: the link's path is `path` with this suffix.
        grace: seconds.

    Attributes:
        link: path of the symbolic link.
    """

    def __init__(self, path: str, suffix: str = ".lock", grace: float = 30.0) -> None:
        self._path, self.link, self.grace = path, path + suffix, grace

    def acquire(self) -> bool:
        """Wait for the lock and take it. Always return True.

        Raises:
            OSError: the folder cannot be written.
        """
        pause, seen, since = 0.001, None, time.monotonic()
        # The grace period restarts when the lock changes hands. Times are of this clock, as hosts' clocks differ.
        while self.take():
            holder = self._holder()
            if holder != seen:
                seen, since = holder, time.monotonic()
            if holder is not None and time.monotonic() - since > self.grace:
                self._break(holder)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def take(self) -> str:
        """Take the lock and return "". If another process holds it and may still run, return that process's name.

        Raises:
            OSError: the folder cannot be written, or its file system has no symbolic links.
        """
        while True:
            try:
                os.symlink(_identity(), self.link)
                return ""
            except FileExistsError:
                holder = self._holder()
            if holder is None:
                continue
            host, _, rest = holder[0].partition("|")
            number, _, start = rest.partition("|")
            # Processes of other hosts cannot be checked; acquire() gives them `grace` seconds.
            if host != _host() or not number.isdigit() or _started(int(number)) == start:
                return f"process {number} of {host.partition('/')[0]}"
            self._break(holder)

    def release(self) -> None:
        """Release the lock, unless another process has taken it over."""
        holder = self._holder()
        if holder is not None and holder[0] == _identity():
            os.unlink(self.link)

    def _holder(self) -> tuple[str, float] | None:
        """Return (identity of the holder, time when it took the lock). Return None if the lock is free."""
        try:
            return os.readlink(self.link), os.lstat(self.link).st_mtime
        except FileNotFoundError:
            return None

    def _break(self, stale: tuple[str, float]) -> None:
        """Remove the lock of the dead process ``stale``, unless another process has taken the lock meanwhile."""
        with open(self._path, "rb") as file:
            # Only one process at a time compares and removes. File systems without flock lose that protection.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if self._holder() == stale:
                aside = f"{self.link}-{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.link, aside)
                    os.unlink(aside)


@contextlib.contextmanager
def holding(lock: FileLock) -> Iterator[None]:
    """Acquire a lock on entry to the context, and release it on exit."""
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _identity() -> str:
    """Return a text that identifies this process: host, boot, process namespace, pid and start time."""
    return f"{_host()}|{os.getpid()}|{_started(os.getpid())}"


@cache
def _host() -> str:
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{name}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return name


def _started(process: int) -> str:
    """Return a process's start time in the system's clock ticks; "" if the process has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc/self") else "?"
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
