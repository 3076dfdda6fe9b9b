"""Who failed first: each rank leaves a note when an exception ends its run."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass

from lockstep.launch.children import Ended

SLACK = 0.5
"""Seconds by which the end of a process may be seen later than what follows from it in the others."""


@dataclass(frozen=True)
class Cause:
    """An exception that came out of a rank's run."""

    rank: int
    at: float  #: seconds on the clock that the processes of this machine share (``time.monotonic``)
    reason: str  #: ``"ValueError: what it said"``
    place: str  #: ``"train.py:14"``, where it was raised
    trace: str  #: the traceback as Python prints it

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, at {self.place}: {self.reason}"


def cause_of(rank: int, error: BaseException) -> Cause:
    """The note on an exception, taken where it is caught."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    return Cause(rank, time.monotonic(), reason, place, "".join(traceback.format_exception(error)))


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

    def read(self) -> list[Cause]:
        """What has been written, the earliest first; of each rank the last."""
        text = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        causes = {cause.rank: cause for cause in (Cause(**json.loads(line)) for line in text.splitlines())}
        return sorted(causes.values(), key=lambda cause: cause.at)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def leave_note(address: str, cause: Cause) -> None:
    """Write a note to the process that started this one; nowhere if that did not hand its file down."""
    descriptor, inode = map(int, address.split(":"))
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, json.dumps(asdict(cause)).encode() + b"\n")
    except OSError:  # closed, or its disk is full: the exception itself matters more
        return


def first_cause(ended: list[Ended], noted: list[Cause]) -> Ended | Cause | None:
    """What ended the run; None if nothing failed.

    A process that ended without a note (killed, crashed, ``os._exit``) breaks the connections to it, so
    exceptions of other ranks about that moment are its consequences. Else the earliest exception counts.

    Args:
        ended: processes that failed by themselves, in order of time.
        noted: notes of ranks whose failure was not caught, in order of time.
    """
    ranks = {cause.rank for cause in noted}
    silent = next((end for end in ended if end.rank not in ranks), None)
    if silent is None or (noted and noted[0].at < silent.at - SLACK):
        return noted[0] if noted else None
    return silent
