"""Mailbox: a file to which a node's ranks write notes for their supervisor."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from lockstep.supervise.causes import Cause
from lockstep.supervise.snapshot import RankPosition

MAILBOX = "LOCKSTEP_MAILBOX"
"""Environment variable with the address of the mailbox."""

RANK = "LOCKSTEP_RANK"
"""Environment variable with the global rank of a started process, for notes before its Trainer exists."""

JOINED = "met"
"""Key of the note by which a rank reports that it has joined the process group."""


class Mailbox:
    """Notes from a node's ranks to their supervisor, in an unnamed file that exists only while a process has it open.

    Args:
        descriptor: descriptor of the file, if another process created it; None: create it.

    Attributes:
        descriptor: descriptor of the file. Started processes inherit it and write to it.
        address: descriptor and inode, for an environment variable. A process without the file detects the mismatch.
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
        self._positions: dict[int, RankPosition] = {}
        self._others: list[dict[str, Any]] = []

    @classmethod
    def at(cls, address: str) -> Mailbox | None:
        """Return the mailbox at an address. Return None if this process did not inherit the mailbox's file."""
        descriptor, inode = map(int, address.split(":"))
        try:
            return cls(descriptor) if os.fstat(descriptor).st_ino == inode else None
        except OSError:
            return None

    def read(self) -> list[Cause]:
        """Return the latest exception of each rank, ordered by time."""
        with self._lock:
            self._read_new()
            return sorted(self._causes.values(), key=lambda cause: cause.at)

    def positions(self) -> dict[int, RankPosition]:
        """Return the latest `RankPosition` of each rank that has made a Trainer call, by rank."""
        with self._lock:
            self._read_new()
            return dict(self._positions)

    def others(self, key: str) -> list[dict[str, Any]]:
        """Return the notes that are dicts with the key ``key``, oldest first."""
        with self._lock:
            self._read_new()
            return [note for note in self._others if key in note]

    def leave(self, note: Cause | RankPosition | dict[str, Any]) -> None:
        """Write a note to the mailbox."""
        leave_note(self.address, note)

    def is_inside(self, rank: int) -> bool:
        """Return True if the rank is inside a Trainer call."""
        position = self.positions().get(rank)
        return position is not None and position.inside

    def has_joined(self) -> bool:
        """Return True once any rank has joined the process group."""
        return bool(self.others(JOINED))

    def is_someone_ending(self) -> bool:
        """Return True if a failed rank is still in its Trainer call, where it may be saving its state."""
        with self._lock:
            self._read_new()
            positions = self._positions
            return any(
                rank in positions and positions[rank].inside and positions[rank].call == cause.call
                for rank, cause in self._causes.items()
            )

    def failed_at(self, rank: int) -> float | None:
        """Return the time of a rank's latest exception. Return None if the rank has reported no exception."""
        return next((cause.at for cause in self.read() if cause.rank == rank), None)

    def close(self) -> None:
        """Close the file. Notes read so far remain available."""
        with self._lock:
            self._read_new()
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _read_new(self) -> None:
        size = 0 if self._closed else os.fstat(self.descriptor).st_size
        if size <= self._read:
            return
        text = os.pread(self.descriptor, size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.split(b"\n"):
            # a truncated note from a full disk is skipped
            with suppress(ValueError, TypeError, RecursionError):
                note = json.loads(line)
                if "reason" in note:
                    self._causes[note["rank"]] = Cause(**note)
                elif "inside" in note:
                    self._positions[note["rank"]] = RankPosition(**note)
                else:
                    self._others.append(note)
        self._read += len(whole)


def file_without_a_name(name: str) -> IO[bytes]:
    """Open an unnamed file. It is in memory if the system supports that, so that a full disk does no harm.

    Writes append. Otherwise, simultaneous writes by two processes would overlap, because the processes share the file's
    position, and Linux does not lock the position for files in memory.

    Args:
        name: name of the file in the system's list of open files.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile(prefix="lockstep-")
    descriptor = os.memfd_create(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return open(descriptor, "w+b", buffering=0)


def leave_note(address: str, note: Cause | RankPosition | dict[str, Any]) -> None:
    """Write a note to the mailbox at an address. Do nothing if this process did not inherit the mailbox's file."""
    descriptor, inode = map(int, address.split(":"))
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, json.dumps(note if isinstance(note, dict) else asdict(note)).encode() + b"\n")
    except OSError:  # closed, or the disk is full: the exception itself matters more
        return
