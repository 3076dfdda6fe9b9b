"""Folders of searches, states of their trials, and submission of trials to SLURM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import storage
from lockstep.extensions.search import queue
from lockstep.extensions.search.queue import QueuedJob, SlurmRefused
from lockstep.extensions.search.trials import TrialFolder, TrialHistory, folders, read_events
from lockstep.ground.errors import MisconfigurationException

SEARCH = "search.json"
SCRIPT = "job.sh"
SEARCHED = "searched"
"""Key for the description of the search, in its settings."""

UNSUBMITTED, PENDING, RUNNING = "unsubmitted", "pending", "running"
PREEMPTED, COMPLETED, PRUNED, FAILED = "preempted", "completed", "pruned", "failed"
CANCELLED, UNKNOWN = "cancelled", "unknown"
FINAL = (COMPLETED, PRUNED, FAILED, CANCELLED, PREEMPTED, UNSUBMITTED)
"""Trial states that do not change until a user resubmits the trial."""

_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_LOST = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")
_OF_JOBS = {
    **dict.fromkeys(_WAITS, (PENDING, "")),
    **dict.fromkeys(_RUNS, (RUNNING, "")),
    **{state: (PREEMPTED, state.lower()) for state in _LOST},
    "CANCELLED": (CANCELLED, ""),
    "TIMEOUT": (FAILED, "its time limit was reached before it was saved"),
    "DEADLINE": (FAILED, "its deadline was reached before it was saved"),
    "OUT_OF_MEMORY": (FAILED, "out of memory, as reported by SLURM"),
    "COMPLETED": (FAILED, "its process ended without reporting the trial's end"),
}
"""State and reason of a trial that has not reported its end, by the state of its job in SLURM."""


@dataclass(frozen=True)
class Limits:
    """Limits of the number of a trial's restarts: after preemptions, and after failures."""

    preemptions: int = 100
    failures: int = 3


@dataclass(frozen=True)
class Status:
    """State of a trial, with its events, values, results and node.

    Attributes:
        error: reason why the trial failed or is waiting.
        node: node of the trial's last start.
    """

    trial: TrialFolder
    state: str
    error: str
    node: str
    history: TrialHistory
    values: Mapping[str, Any]
    result: Mapping[str, Any]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Newest value of each metric that the trial has logged."""
        found: Mapping[str, Any] = self.result.get("metrics", {})
        return found


class Search:
    """Access to the folder of a search, which contains its settings and trials.

    Args:
        path: path of the folder: ``log_path`` and the name of the search.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, settings: Mapping[str, Any]) -> None:
        """Write ``settings`` to the folder of the search."""
        with storage.replacing(self.path / SEARCH) as file:
            file.write(json.dumps(dict(settings), indent=1).encode() + b"\n")

    def claim(self, description: Mapping[str, Any]) -> None:
        """Write the search's description to a new folder. Raise an error if the folder has a different description.

        Args:
            description: description of the search by name, as JSON values.

        Raises:
            MisconfigurationException: the folder contains another search.
        """
        settings = self.settings()
        kept = settings.get(SEARCHED)
        if kept is None:
            self.write({**settings, SEARCHED: dict(description)})
            return
        different = [
            f"{name} is {_as_text(kept, name)} there, and {_as_text(description, name)} here"
            for name in {**kept, **description}
            if _as_text(kept, name) != _as_text(description, name)
        ]
        if different:
            raise MisconfigurationException(
                f"{str(self.path)!r} contains another search: {'; '.join(different)}. Use another log_path or the "
                "earlier settings, or remove the folder"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the search; an empty dict if they are missing or unreadable."""
        try:
            found: dict[str, Any] = json.loads((self.path / SEARCH).read_bytes())
        except (OSError, ValueError):
            return {}
        return found

    @property
    def limits(self) -> Limits:
        """Maximum numbers of restarts of each trial, after preemptions and after failures."""
        settings, standard = self.settings(), Limits()
        most = settings.get("max_preemptions", standard.preemptions)
        return Limits(most, settings.get("max_failures", standard.failures))

    def trials(self) -> list[TrialFolder]:
        """Return the trials in this folder, sorted by number."""
        return folders(self.path)


def _as_text(description: Mapping[str, Any], name: str) -> str:
    return json.dumps(description[name]) if name in description else "unknown"


def found_at(path: str | os.PathLike[str]) -> list[Search]:
    """Return the search whose folder is ``path``, or all searches whose folders are in ``path``."""
    if folders(path):
        return [Search(path)]
    return [Search(inner) for inner in sorted(Path(path).glob("*")) if folders(inner)]


# -- states of trials ----------------------------------------------------------------------------------------


def query_trials(search: Search) -> tuple[list[Status], str]:
    """Return (states of a search's trials, SLURM's error message). The message is "" if SLURM answered."""
    trials = search.trials()
    histories = [read_events(trial.events()) for trial in trials]
    jobs: dict[str, QueuedJob] = {}
    trouble = ""
    try:
        jobs = queue.query_jobs(history.job for history in histories if history.job and not _is_over(history))
    except SlurmRefused as refused:
        trouble = str(refused)
    statuses = []
    for trial, history in zip(trials, histories, strict=True):
        job = jobs.get(history.job)
        state, error = state_of(history, job, has_answered=not trouble)
        node = "" if history.current is None else history.current.host
        if not node and job is not None:
            node = job.nodes
        if state == FAILED and not error:
            error = trial.last_line()
            if not error and history.last is None:
                error = f"it never started: check that {node or 'its node'} sees {trial.path}"
        statuses.append(Status(trial, state, error, node, history, trial.values() or {}, trial.result()))
    return statuses, trouble


def _is_over(history: TrialHistory) -> bool:
    """Return True if the trial has completed, so that the state of its job in SLURM no longer matters."""
    return history.current is not None and history.current.end == "completed"


def state_of(history: TrialHistory, job: QueuedJob | None, has_answered: bool = True) -> tuple[str, str]:
    """Return (state, reason) of a trial. The reason explains why the trial has failed or is waiting.

    A trial is "completed" only if it has reported so itself. A failure counts as a preemption if SLURM restarts the job
    or has lost its node.

    Args:
        history: history of the trial, read from its events.
        job: state of the trial's newest job in SLURM; None if SLURM does not know the job.
        has_answered: True if SLURM has answered.
    """
    # A completed trial stays completed, whatever SLURM reports: its job may fail or be requeued afterwards.
    last = history.current
    if last is not None and last.end == "completed":
        return (PRUNED if last.pruned else COMPLETED), ""
    state, why = _by_job(job, has_started=last is not None)
    # Before the trial's own failure: SLURM restarts the job, or its node was lost and the failure is a consequence.
    if state in (PENDING, PREEMPTED):
        return state, why
    if last is not None and last.end == "failed":
        return FAILED, last.error
    if state in (RUNNING, CANCELLED):
        return state, why
    if history.cancelled:
        return CANCELLED, ""
    if last is not None and last.job is None:  # a process on this machine
        return RUNNING, ""
    # After the local case, because trials on this machine have no job either.
    if not history.job:
        return UNSUBMITTED, ""
    return (state, why) if has_answered else (UNKNOWN, "")


def _by_job(job: QueuedJob | None, has_started: bool) -> tuple[str, str]:
    """Return (state, reason) of a trial that has not reported its end, derived from the state of its job."""
    if job is None:
        return FAILED, "SLURM no longer has its job, and the trial did not report its end"
    state, why = _OF_JOBS.get(job.state, (FAILED, ""))
    if state == PENDING:
        return PENDING, job.reason
    if not why and state == FAILED and has_started:
        return FAILED, f"its job ended as {job.state} without reporting the trial's end"
    return state, why


# -- submission ----------------------------------------------------------------------------------------------


def submit_trials(search: Search, trials: Sequence[TrialFolder], submitted: Callable[[str], None]) -> None:
    """Submit trials whose folders and scripts exist, each as a job of its own or all as one array job.

    Args:
        search: search of the trials.
        trials: the trials, in the order of submission.
        submitted: called at the end with a text about the submitted trials.

    Raises:
        SlurmRefused: sbatch failed. The message has its output, the submitted trials and the remaining ones.
    """
    jobs_by_trial: dict[int, str] = {}
    try:
        for trial, job in _submit_each(search, trials):
            trial.note("submitted", job=job)
            jobs_by_trial[trial.number] = job
    except SlurmRefused as refused:
        raise SlurmRefused(f"{refused}\n{_partial_submission_text(search, trials, jobs_by_trial)}") from None
    except BaseException:  # Ctrl-C
        submitted(_partial_submission_text(search, trials, jobs_by_trial))
        raise
    submitted(_submission_text(jobs_by_trial))


def _submit_each(search: Search, trials: Sequence[TrialFolder]) -> Iterator[tuple[TrialFolder, str]]:
    """Submit the trials. Yield (trial, job number) for each trial, as soon as SLURM has accepted its job."""
    settings = search.settings()
    if settings.get("array"):
        limit = settings.get("at_most")
        numbers = ranges([trial.number for trial in trials]).replace(" ", "")
        array = f"--array={numbers}{f'%{limit}' if limit else ''}"
        # An array job has one argument for all trials; it only has to exceed the numbers of all earlier starts.
        starts = max(map(_starts, trials), default=0)
        job = queue.submit(array, search.path / SCRIPT, str(starts))
        yield from ((trial, f"{job}_{trial.number}") for trial in trials)
    else:
        for trial in trials:
            yield trial, queue.submit(trial.path / SCRIPT, str(_starts(trial)))


def _starts(trial: TrialFolder) -> int:
    """Return the index of a trial's next start: 0 if the trial has not started yet."""
    return max((attempt.number + 1 for attempt in read_events(trial.events()).attempts), default=0)


def _submission_text(jobs_by_trial: Mapping[int, str]) -> str:
    if not jobs_by_trial:
        return "submitted no trial"
    jobs = list(jobs_by_trial.values())
    text = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {jobs[0]} to {jobs[-1]}"
    return f"submitted trial(s) {ranges([*jobs_by_trial])} as {text}"


def _partial_submission_text(search: Search, trials: Sequence[TrialFolder], jobs_by_trial: Mapping[int, str]) -> str:
    rest = ranges([trial.number for trial in trials if trial.number not in jobs_by_trial])
    return (
        f"{_submission_text(jobs_by_trial)}; not submitted: trial(s) {rest or 'none'}. Submit them later with "
        f"lockstep trials {search.path} --resubmit unsubmitted"
    )


def cancel_trials(trials: Iterable[Status]) -> list[TrialFolder]:
    """Cancel the jobs of pending and running trials, and return these trials.

    Raises:
        SlurmRefused: scancel failed; the message has its output.
    """
    chosen = [status for status in trials if status.state in (PENDING, RUNNING, UNKNOWN) and status.history.job]
    queue.cancel(status.history.job for status in chosen)
    for status in chosen:
        status.trial.note("cancelled")
    return [status.trial for status in chosen]


def exhausted(status: Status, limits: Limits) -> str:
    """Return a text about the limit that forbids another start of a trial; "" if another start is allowed."""
    history = status.history
    # A preemption counts when another start follows it; the current one has none yet.
    lost = history.preemptions + (status.state == PREEMPTED)
    if status.state == FAILED and history.failures >= limits.failures:
        return f"trial {status.trial.number} failed {history.failures} time(s), max_failures is {limits.failures}"
    if lost > limits.preemptions:
        return f"trial {status.trial.number} was preempted {lost} time(s), max_preemptions is {limits.preemptions}"
    return ""


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as text, with consecutive numbers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
