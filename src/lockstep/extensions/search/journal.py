"""The journal file of a study: Optuna's, with lines that are checked after each write.

A line is an operation, and trials are numbered by the lines before them. So a line that is torn, by a writer that was
killed or by a network file system, must not stay: it would be read as part of the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

from lockstep.extensions.search.lock import FileLock, held
from lockstep.ground.errors import missing_extra
from lockstep.ground.rank import log

try:
    from optuna.storages.journal import JournalFileBackend
except ModuleNotFoundError:
    raise missing_extra("optuna", "optuna", "the journal of a search with strategy='optuna'") from None

TRIES = 3
"""How often a line is written that does not come out as it was written."""


class CorruptJournal(RuntimeError):
    """The journal of a study has a line that is no whole operation."""


class StudyJournal(JournalFileBackend):
    """Optuna's journal file, in which a torn line is found when it is written, or else when it is read.

    Args:
        path: of the file, which is made.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._held = FileLock(path)
        super().__init__(path, self._held)  # type: ignore[arg-type]  # of locks Optuna has a base, but not for others

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add operations, a line each, and read them back.

        Raises:
            CorruptJournal: the file does not hold what was written.
            OSError: the disk is full, say; nothing of the lines stays.
        """
        data = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        with held(self._held):
            append(self._path, data)

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from a number on. A last line that has no end yet is left out.

        Raises:
            CorruptJournal: a line is none; the message has its number.
        """
        try:
            for told in super().read_logs(log_number_from):
                if not _is_operation(told):
                    raise ValueError("it is no operation")
                yield told
        except ValueError as error:
            number = _operations_before_torn(self._path)
            raise CorruptJournal(
                f"line {number + 1} of {self._path!r} is torn ({error}), and the study cannot be read from there on. "
                f"lockstep checks each line that it writes, so the disk, or another program, has changed it: put the "
                f"file back from a copy, or go on with what comes before, by `head -n {number} FILE > NEW`"
            ) from error


def _is_operation(told: object) -> bool:
    return isinstance(told, dict) and "op_code" in told


def _operations_before_torn(path: str) -> int:
    """The lines before the first that is none: optuna 4 reads all of them before it gives the first."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                told = json.loads(line)
            except ValueError:
                return number
            if not _is_operation(told):
                return number
    return 0


def append(path: str, data: bytes) -> None:
    """Add whole lines to a file, and read them back; called by who holds the lock.

    What a killed writer has left of a line is cut off first.

    Raises:
        CorruptJournal: they do not come back.
        OSError: they cannot be written; nothing of them stays.
    """
    for _ in range(TRIES):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            start = _cut_torn_end(file, path)
            try:
                _write(file, data)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, start)
                raise
        finally:
            os.close(file)
        # opened anew: a network file system then asks the server
        with open(path, "rb") as fresh:
            fresh.seek(start)
            if fresh.read(len(data)) == data:
                return
            beyond = bool(fresh.read(1))
        if beyond:  # who writes there does not heed the lock; nothing may be cut off any more
            break
        os.truncate(path, start)
    raise CorruptJournal(
        f"{path!r} does not hold the line that was written last, after {TRIES} tries: see whether another program "
        "writes into it, or keep the search on another file system"
    )


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _cut_torn_end(file: int, path: str) -> int:
    """Cut off what follows the last line's end; gives the size then."""
    size = os.fstat(file).st_size
    end = size
    while end and (block := os.pread(file, min(end, 4096), end - min(end, 4096))).rfind(b"\n") < 0:
        end -= len(block)
    if end:
        begin = end - min(end, 4096)
        end = begin + os.pread(file, end - begin, begin).rfind(b"\n") + 1
    if end < size:
        log.warning("%s: its last line was torn after %d bytes, by a writer that was killed: cut off", path, size - end)
        os.ftruncate(file, end)
    return end
