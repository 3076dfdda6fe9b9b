"""Submission, cancellation and queries of jobs with SLURM's commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 60
"""Time limit for a SLURM command."""
MANY = 1000
"""Largest number of jobs in the arguments of one command."""


class SlurmRefused(RuntimeError):
    """Error raised because a SLURM command failed; the message contains the command's output."""


@dataclass(frozen=True)
class QueuedJob:
    """State of a job in SLURM."""

    state: str  #: PENDING, RUNNING, COMPLETED, FAILED, PREEMPTED, NODE_FAIL, TIMEOUT, CANCELLED ...
    nodes: str = ""
    reason: str = ""  #: why it is waiting, or failed


def is_available() -> bool:
    """Return True if SLURM's commands are installed on this machine."""
    return shutil.which("sbatch") is not None


def submit(*words: str | Path, text: str | None = None) -> str:
    """Submit a batch script and return the job's number.

    Args:
        words: options of sbatch, which override those in the script, then the script's path and its arguments.
        text: text of the script, if it is not in a file.

    Raises:
        SlurmRefused: sbatch is missing or failed.
    """
    output = _run(["sbatch", "--parsable", *map(str, words)], text)
    found = re.search(r"^(\d+)(;.*)?$", output, re.MULTILINE)  # after the semicolon: the name of a cluster
    if found is None:
        raise SlurmRefused(f"sbatch printed {output.strip()!r:.300} instead of a job number")
    return found[1]


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs, except those that have ended.

    Raises:
        SlurmRefused: scancel is missing or failed.
    """
    for part in _parts(list(jobs)):
        _run(["scancel", *part])


def query_jobs(jobs: Iterable[str]) -> dict[str, QueuedJob]:
    """Return the states of jobs by number; omit the jobs that SLURM no longer lists.

    The controller drops jobs some minutes after their end (MinJobAge). Dropped jobs are looked up with sacct, if the
    cluster has slurmdbd.

    Args:
        jobs: numbers such as ``120``, or ``120_7`` for a task of an array.

    Raises:
        SlurmRefused: squeue is missing or failed.
    """
    wanted = set(jobs)
    found: dict[str, QueuedJob] = {}
    # Array tasks are queried by their array, which squeue --array lists by task.
    for part in _parts(sorted({job.partition("_")[0] for job in wanted})):
        found.update(_in_queue(part))
    missing = wanted - found.keys()
    if missing:
        earlier = _in_accounts(sorted({job.partition("_")[0] for job in missing}))
        found.update((name, job) for name, job in earlier.items() if name in missing)
    return {name: job for name, job in found.items() if name in wanted}


def _in_queue(numbers: Sequence[str]) -> Iterator[tuple[str, QueuedJob]]:
    words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%r", f"--jobs={','.join(numbers)}"]
    try:
        output = _run(words)
    except SlurmRefused as refused:
        # squeue fails like this if it was queried for one job and the controller has dropped it.
        if "Invalid job id" in str(refused):
            return
        raise
    for line in output.splitlines():
        name, state, nodes, reason = [*line.strip().split("|"), "", "", "", ""][:4]
        yield name, QueuedJob(state, nodes, "" if reason == "None" else reason)


def _in_accounts(numbers: Sequence[str]) -> dict[str, QueuedJob]:
    """Return the states of jobs that the controller no longer lists, by number, from SLURM's accounting (``sacct``)."""
    found: dict[str, QueuedJob] = {}
    try:
        for part in _parts(numbers):
            words = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State,NodeList"]
            for line in _run([*words, f"--jobs={','.join(part)}"]).splitlines():
                name, state, nodes = [*line.split("|"), "", "", ""][:3]
                if state:
                    found[name] = QueuedJob(state.split()[0], nodes)  # "CANCELLED by 0"
    except SlurmRefused:  # no slurmdbd
        return {}
    return found


def _parts(jobs: Sequence[str]) -> Iterator[Sequence[str]]:
    return (jobs[at : at + MANY] for at in range(0, len(jobs), MANY))


def _run(words: Sequence[str], text: str | None = None) -> str:
    """Run a SLURM command and return the command's output."""
    try:
        # In its own session: Ctrl-C must not end sbatch between the controller's answer and the reading of its output.
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, errors="replace", timeout=SECONDS, start_new_session=True
        )
    except FileNotFoundError:
        raise SlurmRefused(
            f"{words[0]} is not on PATH. Use a machine with SLURM, or add SLURM's folder to PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmRefused(f"{words[0]} did not finish within {SECONDS} seconds") from None
    except OSError as error:
        raise SlurmRefused(f"{words[0]}: {error}") from None
    if done.returncode:
        output = "; ".join(line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip())
        raise SlurmRefused(output or f"{words[0]} ended with exit code {done.returncode} without output")
    return done.stdout
