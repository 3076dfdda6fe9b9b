"""Folder of a trial on disk, with the trial's hyperparameters, events and metrics."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint import storage
from lockstep.ground.errors import MisconfigurationException

VALUES = "values.json"
EVENTS = "events.jsonl"
RESULT = "result.json"
METRICS = "metrics.jsonl"
STDOUT, STDERR = "stdout", "stderr"
JOURNAL = "study.journal"
"""Journal of the Optuna study, in the folder of the search."""

End = Literal["completed", "pruned", "failed"]
"""State in which a trial can end."""

_NAME = re.compile(r"trial_(\d{4,})")


class TrialFolder:
    """The folder of one trial, ``<search>/trial_0007``.

    It contains

    - ``values.json``: the exact hyperparameters, written atomically,
    - ``events.jsonl``: a line for each event: submitted, started, saved, pruned, failed, completed, cancelled,
    - ``metrics.jsonl`` and ``result.json``: all logged metrics, line by line, and the newest ones,
    - ``stdout`` and ``stderr``: the output of its processes.

    Nothing is kept in memory: each method reads or writes the files, which several processes and nodes share.

    Args:
        path: path of the folder, which need not exist yet.

    Raises:
        ValueError: the name is not ``trial_`` with a number of at least four digits.

    Example:
        >>> import tempfile
        >>> trial = TrialFolder.of(tempfile.mkdtemp(), 7)
        >>> trial.write_values({"lr": 0.1})
        >>> trial.path.name, trial.number, trial.values()
        ('trial_0007', 7, {'lr': 0.1})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        found = _NAME.fullmatch(self.path.name)
        if found is None:
            raise ValueError(
                f"{os.fspath(path)!r} is not a trial's folder, which is named trial_ with at least four digits"
            )
        self.number = int(found[1])

    @classmethod
    def of(cls, search: str | os.PathLike[str], number: int) -> TrialFolder:
        """Return the folder of a trial by its number, from 0."""
        return cls(Path(search) / f"trial_{number:04}")

    def __repr__(self) -> str:
        return f"TrialFolder({str(self.path)!r})"

    # -- values --------------------------------------------------------------------------------------------

    def write_values(self, values: Mapping[str, Any]) -> None:
        """Write the hyperparameters to the folder, which is created if needed.

        Raises:
            MisconfigurationException: a value cannot be converted to JSON.
            OSError: the folder cannot be written.
        """
        text = encoded(values)
        with storage.replacing(self.path / VALUES) as file:
            file.write(text)

    def values(self) -> dict[str, Any] | None:
        """Return the hyperparameters; None if they have not been written."""
        return _read_json(self.path / VALUES)

    # -- events --------------------------------------------------------------------------------------------

    def note(self, event: str, **details: object) -> None:
        """Append an event to the trial's events, with the time and the name of this host.

        Args:
            event: name of the event.
            details: further fields: ``job``, ``attempt``, ``rank``, ``error``, ``value``.
        """
        entry = {"event": event, "time": time.time(), "host": socket.gethostname(), **details}
        _append(self.path / EVENTS, entry)

    def events(self) -> list[dict[str, Any]]:
        """Return all events in the order in which they were written, without lines that a crash has cut off."""
        return list(_lines(self.path / EVENTS))

    # -- metrics -------------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], **progress: int) -> None:
        """Append metrics to the trial's curves, and update the file with the newest values.

        Args:
            metrics: metrics by name. The newest values keep earlier metrics that are missing here.
            progress: progress of the trial: ``epoch``, ``step``, ``attempt``.
        """
        entry = {"time": time.time(), **progress, "metrics": dict(metrics)}
        _append(self.path / METRICS, entry)
        earlier = self.result().get("metrics", {})
        with storage.replacing(self.path / RESULT) as file:
            file.write(encoded({**entry, "metrics": {**earlier, **metrics}}))

    def result(self) -> dict[str, Any]:
        """Return the newest metrics, with ``epoch``, ``step`` and ``time``; an empty dict if none were logged."""
        return _read_json(self.path / RESULT) or {}

    def curves(self) -> list[dict[str, Any]]:
        """Return a list of all logged metrics, with one dict for each call of :meth:`log`."""
        return list(_lines(self.path / METRICS))

    def last_line(self) -> str:
        """Return the last line of the trial's stderr, or of its stdout if stderr has none.

        Lines that SLURM has written count only if there are no other lines.
        """
        lines = [line.strip() for name in (STDOUT, STDERR) for line in _tail(self.path / name).splitlines()]
        lines = [line for line in lines if line]
        own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))]
        return (own or lines or [""])[-1]


def encoded(values: Mapping[str, Any]) -> bytes:
    """Encode values as JSON in ASCII, from which they can be read back exactly.

    Raises:
        MisconfigurationException: a value cannot be converted to JSON.
    """
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"{name}={value!r:.100} cannot be written to a trial's {VALUES} ({error}). Use numbers, text, True, "
                "False, None, and lists and dicts of them"
            ) from None
    return (json.dumps(dict(values)) + "\n").encode()


def folders(search: str | os.PathLike[str]) -> list[TrialFolder]:
    """Return the folders of a search's trials, sorted by number; an empty list if there is no such search."""
    try:
        names = os.listdir(search)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((TrialFolder(Path(search) / name) for name in names if _NAME.fullmatch(name)), key=lambda t: t.number)


# -- history, read from the events ---------------------------------------------------------------------------


@dataclass
class Attempt:
    """One start of a trial, with the events that it reported."""

    number: int
    job: str | None
    host: str
    started: float
    last: float  #: time of its newest event
    pruned: bool = False
    end: str | None = None  #: reported end: "completed" or "failed"
    error: str = ""
    value: float | None = None


@dataclass
class TrialHistory:
    """History of a trial, as its events record it.

    Attributes:
        jobs: numbers of the jobs as which the trial was submitted, the newest last.
        attempts: the trial's starts, in order.
        submitted: time of the trial's last submission.
        cancelled: True if the trial was cancelled after its last start or submission.
    """

    jobs: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    submitted: float = 0.0
    cancelled: bool = False

    @property
    def job(self) -> str:
        """Job number of the newest submission, as text; "" if the trial was never submitted."""
        return self.jobs[-1] if self.jobs else ""

    @property
    def last(self) -> Attempt | None:
        """The newest start of the trial; None if the trial has not started."""
        return self.attempts[-1] if self.attempts else None

    @property
    def is_waiting(self) -> bool:
        """True if the trial has been submitted and has not started since its newest submission."""
        return bool(self.job) and (self.last is None or self.submitted > self.last.started)

    @property
    def current(self) -> Attempt | None:
        """The newest start of the trial; None if the trial has been submitted again since that start."""
        return None if self.is_waiting else self.last

    @property
    def failures(self) -> int:
        """Number of starts that ended with an exception and that SLURM did not restart by itself."""
        return self.restarts - self.preemptions + (self.last is not None and self.last.end == "failed")

    @property
    def preemptions(self) -> int:
        """Number of restarts, excluding resubmissions after a failure."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return self.restarts - sum(attempt.end == "failed" and then.job != attempt.job for attempt, then in pairs)

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(0, len(self.attempts) - 1)

    @property
    def seconds(self) -> float:
        """Total seconds of all starts, each from its first to its last event."""
        return sum(max(0.0, attempt.last - attempt.started) for attempt in self.attempts)


def read_events(events: list[dict[str, Any]]) -> TrialHistory:
    """Read the history of a trial from its events.

    Each rank reports its own failure. If a start has failed on any rank, it counts as failed. Its error is the first
    one that does not merely report the failure of another rank.
    """
    history, by_number = TrialHistory(), dict[int, Attempt]()
    for entry in events:
        kind, moment, number = entry.get("event"), float(entry.get("time", 0.0)), int(entry.get("attempt") or 0)
        if kind == "submitted":
            history.jobs.append(str(entry.get("job")))
            history.submitted, history.cancelled = moment, False
        elif kind == "cancelled":
            history.cancelled = True
        elif kind == "started":
            attempt = Attempt(number, entry.get("job"), str(entry.get("host", "")), moment, moment)
            by_number[number] = attempt
            history.attempts.append(attempt)
            history.cancelled = False
        elif number in by_number:
            attempt = by_number[number]
            attempt.last = max(attempt.last, moment)
            _apply_event(attempt, str(kind), entry)
    history.attempts.sort(key=lambda attempt: attempt.number)
    return history


def _apply_event(attempt: Attempt, kind: str, entry: Mapping[str, Any]) -> None:
    error = str(entry.get("error", ""))
    if kind == "pruned":
        attempt.pruned = True
    elif kind == "failed":
        if attempt.end != "failed" or (attempt.error.startswith("RankFailed") and not error.startswith("RankFailed")):
            attempt.error = error
        attempt.end = "failed"
    elif kind == "completed" and attempt.end is None:
        attempt.end, attempt.value = kind, entry.get("value")


# -- files ---------------------------------------------------------------------------------------------------


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    line = json.dumps(entry).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash has cut the previous line
            line = b"\n" + line
        # One write for the whole line, so that lines of several processes do not mix.
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut by a crash, or the null bytes of a network file system
            continue
        if isinstance(entry, dict):
            yield entry


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _tail(path: Path, size: int = 4096) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
