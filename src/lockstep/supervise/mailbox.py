"""The mailbox: a file in which the ranks of a node leave notes for the process that watches them."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from lockstep.supervise.causes import Cause, Stand

MAILBOX = "LOCKSTEP_MAILBOX"
"""The variable with the address of the mailbox into which a rank puts notes."""

RANK = "LOCKSTEP_RANK"
"""The variable with the rank of a started process among all, for what it notes before its Trainer."""

MET = "met"
"""The key of the note by which a rank reports that it has joined the others."""


class Mailbox:
    """What the ranks of a node put in for their supervisor: a file without a name, which leaves nothing.

    Args:
        descriptor: of the file, where another process has made it; None: make it.

    Attributes:
        descriptor: of the file; a started process inherits it and writes to it.
        address: the same for an environment variable; a process that got only the variable can tell.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if descriptor is None:
            self._file = file_without_a_name("lockstep-mailbox")
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self.address = f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        self._lock = threading.Lock()
        self._closed = False
        self._read = 0
        self._causes: dict[int, Cause] = {}
        self._stands: dict[int, Stand] = {}
        self._others: list[dict[str, Any]] = []

    @classmethod
    def at(cls, address: str) -> Mailbox | None:
        """The mailbox at an address; None if this process cannot read there."""
        descriptor, inode = map(int, address.split(":"))
        try:
            return cls(descriptor) if os.fstat(descriptor).st_ino == inode else None
        except OSError:
            return None

    def read(self) -> list[Cause]:
        """The exceptions so far, the earliest first; of each rank the last."""
        with self._lock:
            self._take_in()
            return sorted(self._causes.values(), key=lambda cause: cause.at)

    def stands(self) -> dict[int, Stand]:
        """Where each rank stands that has come to a call, by rank."""
        with self._lock:
            self._take_in()
            return dict(self._stands)

    def others(self, key: str) -> list[dict[str, Any]]:
        """Other notes that have such a key, in the order in which they were left."""
        with self._lock:
            self._take_in()
            return [note for note in self._others if key in note]

    def leave(self, note: Cause | Stand | dict[str, Any]) -> None:
        """Leave one."""
        leave_note(self.address, note)

    def is_inside(self, rank: int) -> bool:
        """Whether a rank has gone into a call and not come out of it."""
        stand = self.stands().get(rank)
        return stand is not None and stand.inside

    def has_met(self) -> bool:
        """Return True once some rank has joined the others."""
        return bool(self.others(MET))

    def is_someone_ending(self) -> bool:
        """Whether a rank has failed and is not out of its call yet: it may be saving what it has."""
        with self._lock:
            self._take_in()
            stands = self._stands
            return any(
                rank in stands and stands[rank].inside and stands[rank].call == cause.call
                for rank, cause in self._causes.items()
            )

    def failed_at(self, rank: int) -> float | None:
        """When a rank left a note on an exception; None if it has not."""
        return next((cause.at for cause in self.read() if cause.rank == rank), None)

    def close(self) -> None:
        """Let go of the file; what was in it can still be read."""
        with self._lock:
            self._take_in()
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _take_in(self) -> None:
        size = 0 if self._closed else os.fstat(self.descriptor).st_size
        if size <= self._read:
            return
        text = os.pread(self.descriptor, size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.split(b"\n"):
            with suppress(ValueError, TypeError, RecursionError):  # half a note, where a disk was full: it is left out
                note = json.loads(line)
                if "reason" in note:
                    self._causes[note["rank"]] = Cause(**note)
                elif "inside" in note:
                    self._stands[note["rank"]] = Stand(**note)
                else:
                    self._others.append(note)
        self._read += len(whole)


def file_without_a_name(name: str) -> IO[bytes]:
    """In memory where the system can do that: on a disk that is full, nobody could leave a note on it.

    Each note goes to the end: processes share the file's position, which Linux does not guard for a file in memory, so
    that two that write at once would write to one place.

    Args:
        name: what the system's list of open files says of it.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile(prefix="lockstep-")
    descriptor = os.memfd_create(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return open(descriptor, "w+b", buffering=0)


def leave_note(address: str, note: Cause | Stand | dict[str, Any]) -> None:
    """Write a note to the process that watches this one; nowhere if that did not hand its file down."""
    descriptor, inode = map(int, address.split(":"))
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, json.dumps(note if isinstance(note, dict) else asdict(note)).encode() + b"\n")
    except OSError:  # closed, or its disk is full: the exception itself matters more
        return
