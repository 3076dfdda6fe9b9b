"""Attempts at a run that SLURM or ``lockstep run`` restarts. Ranks of earlier attempts must not change checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint import storage
from lockstep.cluster import slurm
from lockstep.ground.installed import EXIT_JOB
from lockstep.ground.rank import log

# -- attempts ------------------------------------------------------------------------------------------------


class Superseded(RuntimeError):
    """Error raised on a rank that still runs an earlier attempt, to prevent the rank from changing checkpoints."""


class Attempts(ABC):
    """Base class of attempts at a run, which is restarted after a failure or when the time of its job is up.

    A file next to the checkpoints records the newest attempt, and the checkpoint that each of its fits wrote last.
    Ranks left over from an earlier attempt find a newer one in the file, and stop touching checkpoints. Fits are
    numbered from 1, in the order in which the script makes them.

    Attributes:
        path: path of the file; "" where this rank does not know it.
        attempt: number of this attempt. Later attempts have greater numbers.
        asks: signals that request to save and restart the run.
        requeues: whether the process that started the run restarts it on such a signal.
        saves: whether SIGTERM saves the run before it ends.
        agent: name of the agent that started this rank; "" where it is not needed.
        is_kept: whether fits are saved periodically and at their end, if nothing else saves them.
    """

    asks: tuple[int, ...] = ()
    requeues = False
    saves = False
    agent = ""
    is_kept = False

    def __init__(self, path: str, attempt: int) -> None:
        self.path = path
        self.attempt = attempt

    @abstractmethod
    def __str__(self) -> str:
        """Return the name of the run and the attempt, for messages."""

    @abstractmethod
    def superseded_by(self, newest: int) -> str:
        """Return the error message for a rank of this attempt after the attempt ``newest`` has started."""

    @abstractmethod
    def checkpoint(self, call: int) -> str:
        """Return the path at which lockstep saves the fit with number ``call`` for the next attempt."""

    @abstractmethod
    def enter(self, agents: Sequence[str] = ()) -> None:
        """Register this attempt as the newest in the run's file. Called on rank 0.

        Args:
            agents: names of the agents that started the ranks.

        Raises:
            Superseded: there is a newer attempt.
        """

    def claim(self) -> tuple[str, int] | None:
        """On rank 0, return (path of the run's file, attempt's number) for other ranks' `join`; None if not needed."""
        return None

    def join(self, claim: tuple[str, int]) -> None:  # noqa: B027, there may be nothing to take over
        """On the other ranks, store the path and the attempt's number that rank 0's `claim` returned."""

    @abstractmethod
    def requeue(self) -> str:
        """Request a restart of the run, which ends its processes. Return "", or the reason if the request failed."""

    def done(self, call: int) -> None:  # noqa: B027, nor to do
        """On rank 0, record that a fit has ended and that the script continues."""

    # -- the file, written by rank 0 -----------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return the content of the run's file. Raise an error if the file records a newer attempt.

        Raises:
            Superseded: there is a newer attempt.
        """
        known = read(self.path) if self.path else {}
        newest = known.get("attempt", 0)
        if newest > self.attempt:
            raise Superseded(self.superseded_by(newest))
        return known

    def saved(self, path: str, call: int) -> None:
        """Record in the run's file a checkpoint from which the fit with number ``call`` can be resumed."""
        known = self.check()
        self.write({**known, "attempt": self.attempt, "saved": {**known.get("saved", {}), str(call): path}})

    def newest(self, call: int) -> str | None:
        """Return the last checkpoint that an earlier attempt recorded for a fit. Return None if there is none."""
        path = self.check().get("saved", {}).get(str(call)) if self.attempt else None
        return path if path is not None and storage.exists(path) else None

    def write(self, known: dict[str, Any]) -> None:
        """Replace the content of the run's file by ``known``."""
        with storage.replacing(self.path) as file:
            file.write(json.dumps(known).encode())


def read(path: str) -> dict[str, Any]:
    """Return the content of a run's file, or {} if the file does not exist."""
    try:
        with storage.reading(path) as file:
            known: dict[str, Any] = json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return known


# -- a SLURM job ---------------------------------------------------------------------------------------------


END_TIMEOUT = 600.0
"""Seconds that a rank waits after saving until SLURM ends it."""


TRIAL = "LOCKSTEP_TRIAL"
"""Environment variable with the folder of the search trial that this process belongs to."""


def trial_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder of the search trial that this process belongs to, or None outside a trial."""
    return environ.get(TRIAL) or None


@dataclass(frozen=True)
class Trial:
    """A search trial to which this process belongs: its folder, its attempt and its SLURM job."""

    folder: str
    attempt: int  #: number of earlier starts
    job: str | None  #: name for SLURM's commands; None outside of SLURM


def trial_here(environ: Mapping[str, str] = os.environ) -> Trial | None:
    """Return the search trial that this process belongs to, or None outside a trial."""
    folder = trial_folder(environ)
    return None if folder is None else Trial(folder, slurm.attempt(environ), slurm.job_name(environ))


class Job(Attempts):
    """One attempt at a run in a SLURM job. The run's file is ``.lockstep-job-<number>.json``.

    The file records the newest attempt, and the checkpoint that each of its fits wrote last. Ranks left over from an
    earlier attempt find a newer one in the file, and stop touching checkpoints.

    A search may submit a trial again as another job, which resumes from its earlier checkpoints. The file of a trial is
    ``.lockstep-trial.json`` in the trial's own folder.

    Args:
        folder: folder of the file and of the checkpoints of :meth:`checkpoint`. All nodes see it.
        requeues: whether the job requeues itself on request.
        asks: signals that request saving and requeuing.
        environ: the environment.
    """

    def __init__(
        self, folder: str, requeues: bool, asks: tuple[int, ...], environ: Mapping[str, str] = os.environ
    ) -> None:
        self.number = environ["SLURM_JOB_ID"]
        self._trial = trial_folder(environ)
        folder = self._trial or folder
        self._stem = f"job-{self.number}" if self._trial is None else "trial"
        super().__init__(os.path.join(folder, f".lockstep-{self._stem}.json"), slurm.attempt(environ))
        self.requeues = self.saves = requeues
        self.asks = asks if requeues else ()
        self._name = slurm.job_name(environ) or self.number
        self._folder = folder

    def __str__(self) -> str:
        return f"SLURM job {self.number}, attempt {self.attempt + 1}"

    def superseded_by(self, newest: int) -> str:
        what, counted = f"SLURM job {self.number}", "SLURM_RESTART_COUNT"
        if self._trial is not None:
            what, counted = f"the trial in {self._trial}", "starts before this one"
        return (
            f"{what} has been restarted ({counted}={newest}, but {self.attempt} in this process): this process belongs "
            "to an earlier attempt and may no longer write or remove checkpoints"
        )

    def checkpoint(self, call: int) -> str:
        """Return the path at which a fit is saved before the job ends. ``call`` counts this process' fits from 1."""
        return os.path.join(self._folder, f"lockstep-{self._stem}-fit-{call}.ckpt")

    def enter(self, agents: Sequence[str] = ()) -> None:
        known = self.check()
        if self.attempt:
            self.write({**known, "attempt": self.attempt})

    def done(self, call: int) -> None:
        """Remove a finished fit's records when this process exits, unless the script has failed.

        SLURM may stop and restart the job before the exit, for instance during a test after the fit. Without the
        records, the restarted script would train the fit again from the start.
        """
        EXIT_JOB.at_exit(self._forget, call)

    def _forget(self, call: int) -> None:
        """Remove a fit's records. The attempt's number stays, so that earlier attempts cannot change checkpoints."""
        # keep the records if the script has failed after the fit
        if getattr(sys, "last_value", None) is not None:
            return
        with contextlib.suppress(Superseded):
            known = self.check()
            remaining = {key: path for key, path in known.get("saved", {}).items() if key != str(call)}
            if storage.exists(self.checkpoint(call)):
                storage.remove(self.checkpoint(call))
            if remaining or self.attempt:
                self.write({"attempt": self.attempt, "saved": remaining})
            elif known:
                storage.remove(self.path)

    # -- end -----------------------------------------------------------------------------------------------

    def requeue(self) -> str:
        """Let SLURM requeue this job, which ends its processes. Return "", or the reason if the request failed."""
        try:
            done = subprocess.run(
                ["scontrol", "requeue", self._name], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"scontrol requeue {self._name}: {error}"
        if done.returncode:
            return f"scontrol requeue {self._name} ended with exit code {done.returncode}: {done.stderr.strip()}"
        log.info("lockstep: SLURM job %s is requeued", self._name)
        return ""


def job_here(folder: str, cluster: object = None, environ: Mapping[str, str] = os.environ) -> Job | None:
    """Return the SLURM job in which this process is a rank. None for processes that are not ranks of a job.

    Ranks are tasks that srun started, and the batch script of a job with a single task.

    Args:
        folder: folder of the file and the checkpoints.
        cluster: the user's cluster environment, which may set ``auto_requeue`` and ``requeue_signal``; None: the
            defaults.
        environ: the environment.
    """
    if not slurm.is_task(environ) and not slurm.is_only_task(environ):
        return None
    requested = getattr(cluster, "requeue_signal", None)
    asks = (signal.SIGUSR1, signal.SIGUSR2) if requested is None or cluster is None else (requested,)
    return Job(folder, getattr(cluster, "auto_requeue", True), tuple(int(number) for number in asks), environ)


def await_end(seconds: float = END_TIMEOUT) -> None:
    """Wait until SLURM ends this process. If the process exited itself, SLURM would consider the job finished."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)


# -- lockstep run --------------------------------------------------------------------------------------------


RUN = "LOCKSTEP_RUN"
"""Environment variable with the name of a run that may be restarted. Equal commands have equal names."""
AGENT = "LOCKSTEP_AGENT"
"""Environment variable with the name of the agent that started this rank. Restarts do not change the name."""
RESUME = "LOCKSTEP_RESUME"
"""Environment variable that is ``1`` if the run resumes from an earlier agent's checkpoints."""
RECORDS = "LOCKSTEP_RECORDS"
"""Environment variable with the file in which rank 0 records the path of the run's file, for its agent."""


class Run(Attempts):
    """One attempt at a run of ``lockstep run``. The run's file is ``.lockstep-run-<name>-<agent>.json``.

    Agents on several nodes count their restarts independently, so the file counts the attempts. Rank 0 increments the
    count at its first fit. Two attempts belong to the same run if one agent has started ranks in both. With
    ``--resume``, an attempt belongs to the run with the newest file for this name.

    Args:
        folder: folder of the file and of the checkpoints of :meth:`checkpoint`. All nodes see it.
        job: the surrounding SLURM job, which can requeue the run.
        environ: the environment.
    """

    saves = True
    is_kept = True

    def __init__(self, folder: str, job: Job | None = None, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__("", 0)
        self.name, self.agent = environ[RUN], environ.get(AGENT, "")
        self._resumes = environ.get(RESUME) == "1"
        self._records = environ.get(RECORDS, "")
        self._folder = folder
        self._job = job
        if job is not None:
            self.asks, self.requeues = job.asks, job.requeues
        known = _entered.get((folder, self.name))
        if known is not None:
            self.path, self.attempt = known

    def __str__(self) -> str:
        return f"lockstep run, attempt {self.attempt}"

    def superseded_by(self, newest: int) -> str:
        return (
            f"this run has been restarted ({self.path} is at attempt {newest}; this process belongs to attempt "
            f"{self.attempt}): ranks of an earlier attempt may no longer write or remove checkpoints"
        )

    def checkpoint(self, call: int) -> str:
        stem, _ = os.path.splitext(os.path.basename(self.path))
        return os.path.join(self._folder, f"{stem.lstrip('.')}-fit-{call}.ckpt")

    def enter(self, agents: Sequence[str] = ()) -> None:
        if not self.path:
            self.path, known = self._find(agents)
            self.attempt = known.get("attempt", 0) + 1
            self.write({**known, "attempt": self.attempt, "agents": sorted(set(agents))})
            self.join(self.claim())
            if self._records:
                with open(self._records, "a") as file:
                    file.write(f"{self.path}\n")
        self.check()

    def claim(self) -> tuple[str, int]:
        return self.path, self.attempt

    def join(self, claim: tuple[str, int]) -> None:
        self.path, self.attempt = _entered[self._folder, self.name] = claim

    def newest(self, call: int) -> str | None:
        return super().newest(call) if self.attempt > 1 else None

    def requeue(self) -> str:
        assert self._job is not None
        return self._job.requeue()

    def _find(self, agents: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """Return (path, content) of the file of this attempt's run. For a new run, the content is {}."""
        stem = f".lockstep-run-{self.name}-"
        names = [name for name in storage.names(self._folder) if name.startswith(stem) and name.endswith(".json")]
        files = {path: read(path) for path in (os.path.join(self._folder, name) for name in names)}
        own = [path for path, known in files.items() if set(agents) & set(known.get("agents", []))]
        if not own and self._resumes:
            # the newest run that has saved anything
            own = sorted((path for path, known in files.items() if known.get("saved")), key=storage.modified)[-1:]
            if not own:
                log.info(
                    f"lockstep run --resume: no earlier run of this command has a checkpoint in {self._folder!r}, so "
                    "this starts a new run"
                )
        if own:
            return own[0], files[own[0]]
        return os.path.join(self._folder, f"{stem}{self.agent}.json"), {}


_entered: dict[tuple[str, str], Any] = {}
"""Path and number of this process' attempt, by folder and run. All fits of a process belong to one attempt."""


def remove_records(path: str, done: bool) -> None:
    """Remove a run's file and the checkpoints that lockstep saved by itself for the next attempt.

    Args:
        path: path of the file.
        done: whether the run has finished. Otherwise, everything that ``--resume`` needs is kept.
    """
    if not done and read(path).get("saved"):
        return
    folder, name = os.path.split(path)
    stem = name.removesuffix(".json").lstrip(".") + "-fit-"
    for found in storage.names(folder):
        if found.startswith(stem) and found.endswith(".ckpt"):
            storage.remove(os.path.join(folder, found))
    storage.remove(path)


def attempts_here(folder: str, cluster: object = None, environ: Mapping[str, str] = os.environ) -> Attempts | None:
    """Return this process' attempt at a run that ``lockstep run`` or SLURM restarts; None if neither restarts it.

    Args:
        folder: folder of the file and the checkpoints.
        cluster: the user's cluster environment, as for :func:`lockstep.launch.attempts.job_here`.
        environ: the environment.
    """
    job = job_here(folder, cluster, environ)
    return Run(folder, job, environ) if environ.get(RUN) else job
