"""Notes that ranks leave for the process that started them: where they stand, and what ended their runs."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import asdict

from lockstep.launch.causes import Cause, Stand


class Notes:
    """The notes of all ranks of a node: a file without a name, of which nothing is left, come what may.

    Attributes:
        descriptor: of the file; a started process inherits it and writes to it.
        address: the same for an environment variable; a process that got only the variable can tell.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="lockstep-")  # noqa: SIM115, open as long as the ranks run
        self.descriptor = self._file.fileno()
        self.address = f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        self._lock = threading.Lock()
        self._text = b""
        self._causes: dict[int, Cause] = {}
        self._stands: dict[int, Stand] = {}

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

    def is_inside(self, rank: int) -> bool:
        """Whether a rank has gone into a call and not come out of it."""
        stand = self.stands().get(rank)
        return stand is not None and stand.inside

    def is_someone_ending(self) -> bool:
        """Whether a rank has failed and is not out of its call yet: it may be saving what it has."""
        with self._lock:
            self._take_in()
            stands = self._stands
            return any(
                rank in stands and stands[rank].inside and stands[rank].call == cause.call
                for rank, cause in self._causes.items()
            )

    def close(self) -> None:
        """Let go of the file; what was in it can still be read."""
        with self._lock:
            self._take_in()
            self._file.close()

    def _take_in(self) -> None:
        size = 0 if self._file.closed else os.fstat(self.descriptor).st_size
        if size <= len(self._text):
            return
        text = os.pread(self.descriptor, size, 0)
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole[len(self._text) :].splitlines():
            note = json.loads(line)
            if "reason" in note:
                self._causes[note["rank"]] = Cause(**note)
            else:
                self._stands[note["rank"]] = Stand(**note)
        self._text = whole


def leave_note(address: str, note: Cause | Stand) -> None:
    """Write a note to the process that started this one; nowhere if that did not hand its file down."""
    descriptor, inode = map(int, address.split(":"))
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
    except OSError:  # closed, or its disk is full: the exception itself matters more
        return
