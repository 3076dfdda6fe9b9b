"""A lock for processes of several nodes that outlives nobody: a symbolic link that names who has it."""

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
"""Seconds between two looks at a lock that somebody has."""


class FileLock:
    """A lock for processes of several nodes: a symbolic link beside the file, which names who has it.

    Where Optuna's own tools lock the journal, they use the same link. A lock of a process of this host that has died
    is taken over at once; one of another host when it has not changed for `grace` seconds.

    Args:
        path: of the file that exists and is locked. The lock's name is the same with `suffix`.
        suffix: of the name.
        grace: seconds.

    Attributes:
        link: the path of the symbolic link.
    """

    def __init__(self, path: str, suffix: str = ".lock", grace: float = 30.0) -> None:
        self._path, self.link, self.grace = path, path + suffix, grace

    def acquire(self) -> bool:
        """Wait for the lock.

        Raises:
            OSError: the folder cannot be written.
        """
        pause, seen, since = 0.001, None, time.monotonic()
        while self.take():
            found = self._look()
            if found != seen:
                seen, since = found, time.monotonic()
            if found is not None and time.monotonic() - since > self.grace:
                self._break(found)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def take(self) -> str:
        """Take the lock, unless somebody who may live has it; gives who that is, or nothing where it is taken now.

        Raises:
            OSError: the folder cannot be written, or its file system has no symbolic links.
        """
        while True:
            try:
                os.symlink(_identity(), self.link)
                return ""
            except FileExistsError:
                found = self._look()
            if found is not None and not _has_died(found[0]):
                host, number, _ = f"{found[0]}||".split("|", 2)
                return f"process {number} of {host.partition('/')[0]}"
            if found is not None:
                self._break(found)

    def release(self) -> None:
        """Give the lock back, unless somebody has taken it over."""
        found = self._look()
        if found is not None and found[0] == _identity():
            os.unlink(self.link)

    def _look(self) -> tuple[str, float] | None:
        """Who has the lock, and since when; None: nobody."""
        try:
            return os.readlink(self.link), os.lstat(self.link).st_mtime
        except FileNotFoundError:
            return None

    def _break(self, stale: tuple[str, float]) -> None:
        """Remove a lock that nobody will give back, unless it is another one by now."""
        with open(self._path, "rb") as file:
            with contextlib.suppress(OSError):  # a file system without: then two may look at once
                fcntl.flock(file, fcntl.LOCK_EX)
            if self._look() == stale:
                aside = f"{self.link}-{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.link, aside)
                    os.unlink(aside)


@contextlib.contextmanager
def held(lock: FileLock) -> Iterator[None]:
    """Hold a lock."""
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _identity() -> str:
    """This process, by what no other one has: machine, boot, process namespace, number, start."""
    return f"{_host()}|{os.getpid()}|{_started(os.getpid())}"


def _has_died(identity: str) -> bool:
    """Whether a process of this host is gone; False for processes of other hosts, of which nobody knows."""
    host, _, rest = identity.partition("|")
    number, _, start = rest.partition("|")
    return host == _host() and number.isdigit() and _started(int(number)) != start


@cache
def _host() -> str:
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{name}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return name


def _started(process: int) -> str:
    """When a process was started, as the system counts; empty where there is none, or it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            told = file.read().rpartition(b")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc/self") else "?"
    return "" if told[0] in (b"Z", b"X") else told[19].decode()
