"""Journal file of an Optuna study. Each write is checked by reading the written lines back.

A line is an operation, and trials are numbered by the lines before them. A partial line, left by a killed writer or a
network file system, must be removed: the next line would be appended to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

from lockstep.extensions.search.lock import FileLock, holding
from lockstep.ground.errors import missing_extra
from lockstep.ground.rank import log

try:
    from optuna.storages.journal import JournalFileBackend
except ModuleNotFoundError:
    raise missing_extra("optuna", "optuna", "the journal of a search with strategy='optuna'") from None

TRIES = 3
"""Number of attempts to write a line that reads back differently."""


class CorruptJournal(RuntimeError):
    """Error raised if a line of a study's journal is damaged."""


class StudyJournal(JournalFileBackend):
    """Journal file for Optuna that detects incomplete lines when it writes them, or at the latest when it reads.

    Args:
        path: path of the file, which is created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file_lock = FileLock(path)
        super().__init__(path, self._file_lock)  # type: ignore[arg-type]  # Optuna's base class of locks is private

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append one line for each operation, then read the lines back and check them.

        Raises:
            CorruptJournal: the file does not contain what was written.
            OSError: the lines cannot be written, for example because the disk is full. The file is unchanged.
        """
        data = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        with holding(self._file_lock):
            append(self._path, data)

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the operations from number ``log_number_from`` on, except an incomplete last line.

        Raises:
            CorruptJournal: a line is not an operation; the message has its number.
        """
        try:
            for operation in super().read_logs(log_number_from):
                if not _is_operation(operation):
                    raise ValueError("it is not an operation")
                yield operation
        except ValueError as error:
            number = _count_valid_lines(self._path)
            raise CorruptJournal(
                f"line {number + 1} of {self._path!r} is damaged ({error}), so the study cannot be read from there on. "
                "lockstep checks each line that it writes, so the disk or another program has changed it. Restore the "
                f"file from a copy, or keep the lines before it with `head -n {number} FILE > NEW`"
            ) from error


def _is_operation(operation: object) -> bool:
    return isinstance(operation, dict) and "op_code" in operation


def _count_valid_lines(path: str) -> int:
    """Return the number of valid lines before the first damaged line.

    Optuna 4 reads all lines before it yields the first, so the yielded ones cannot be counted.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                operation = json.loads(line)
            except ValueError:
                return number
            if not _is_operation(operation):
                return number
    return 0


def append(path: str, data: bytes) -> None:
    """Append complete lines to a file and check them by reading them back. The caller must hold the lock.

    A partial line of a killed writer is removed first.

    Raises:
        CorruptJournal: the lines read back differently.
        OSError: the lines cannot be written. The file is unchanged.
    """
    for _ in range(TRIES):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            start = _remove_partial_line(file, path)
            try:
                _write(file, data)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, start)
                raise
        finally:
            os.close(file)
        # Opened again, because a network file system then reads from the server and not from its cache.
        with open(path, "rb") as fresh:
            fresh.seek(start)
            if fresh.read(len(data)) == data:
                return
            beyond = bool(fresh.read(1))
        # Another program appends without the lock: truncating would remove its lines.
        if beyond:
            break
        os.truncate(path, start)
    raise CorruptJournal(
        f"{path!r} reads back differently after {TRIES} attempts to write its last line. Check whether another program "
        "writes to it, or keep the search on another file system"
    )


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _remove_partial_line(file: int, path: str) -> int:
    """Remove an incomplete last line from the file, and return the file's size."""
    size = os.fstat(file).st_size
    end = size
    while end and (block := os.pread(file, min(end, 4096), end - min(end, 4096))).rfind(b"\n") < 0:
        end -= len(block)
    if end:
        start = end - min(end, 4096)
        end = start + os.pread(file, end - start, start).rfind(b"\n") + 1
    if end < size:
        log.warning("%s: removed a partial last line of %d bytes, left by a killed writer", path, size - end)
        os.ftruncate(file, end)
    return end
