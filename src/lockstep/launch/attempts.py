"""Attempts at one run: their fence, a SLURM job that is requeued, and a run of ``lockstep run``."""

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
    """A rank of an earlier attempt at a run, on a node that was cut off say, was about to touch its checkpoints."""


class Attempts(ABC):
    """A run that is started anew when it has failed, or when its time is up, as one attempt at it sees it.

    A file beside the checkpoints says which attempt is the newest and which checkpoint each fit of it wrote last.
    Ranks that are left over from an earlier attempt find there that they have been replaced, and touch no checkpoint
    any more. Fits are numbered from 1 in the order in which the script makes them.

    Attributes:
        path: of the file; "" where this rank does not know it.
        attempt: the number of this one, of which later ones have greater.
        asks: signals that ask for the run to be saved and started anew.
        requeues: whether whoever started the run starts it anew on such a signal.
        saves: whether SIGTERM has the run saved before it ends.
        agent: who started this rank; "" where nobody needs to know.
        is_kept: whether fits are saved from time to time where nobody else does it, and at their end.
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
        """The run, as sentences say it."""

    @abstractmethod
    def told(self, newest: int) -> str:
        """What is said to a rank that has been replaced by the attempt ``newest``."""

    @abstractmethod
    def checkpoint(self, call: int) -> str:
        """Where lockstep itself saves the fit number ``call``."""

    @abstractmethod
    def enter(self, agents: Sequence[str] = ()) -> None:
        """This attempt is the newest one from here on. On rank 0.

        Args:
            agents: who started each rank.

        Raises:
            Superseded: there is a newer one.
        """

    def claim(self) -> tuple[str, int] | None:
        """What the other ranks have to know of an attempt that rank 0 has entered; None: nothing."""
        return None

    def join(self, claim: tuple[str, int]) -> None:  # noqa: B027, there may be nothing to take over
        """On the other ranks: take over what rank 0 has told."""

    @abstractmethod
    def requeue(self) -> str:
        """Have the run started anew, which ends its processes; gives the reason if that did not work."""

    def done(self, call: int) -> None:  # noqa: B027, nor to do
        """A fit has come to its end, and the script goes on. On rank 0."""

    # -- the file: rank 0 writes it ------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """What the file says.

        Raises:
            Superseded: that there is a newer attempt.
        """
        known = read(self.path) if self.path else {}
        newest = known.get("attempt", 0)
        if newest > self.attempt:
            raise Superseded(self.told(newest))
        return known

    def saved(self, path: str, call: int) -> None:
        """A checkpoint that a fit could go on from has been written."""
        known = self.check()
        self.write({**known, "attempt": self.attempt, "saved": {**known.get("saved", {}), str(call): path}})

    def newest(self, call: int) -> str | None:
        """The checkpoint that an earlier attempt at this fit wrote last, if it is still there; None in a first one."""
        path = self.check().get("saved", {}).get(str(call)) if self.attempt else None
        return path if path is not None and storage.exists(path) else None

    def write(self, known: dict[str, Any]) -> None:
        """Replace the file."""
        with storage.replacing(self.path) as file:
            file.write(json.dumps(known).encode())


def read(path: str) -> dict[str, Any]:
    """What such a file says; nothing where there is none."""
    try:
        with storage.reading(path) as file:
            known: dict[str, Any] = json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return known


# -- a SLURM job ---------------------------------------------------------------------------------------------


LONGEST = 600.0
"""Seconds that a rank which has saved waits for SLURM to end it."""


TRIAL = "LOCKSTEP_TRIAL"
"""The variable with the folder of the trial of a search that this process is a part of."""


def trial_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """The folder of the trial that this process is a part of; None where it is in none."""
    return environ.get(TRIAL) or None


@dataclass(frozen=True)
class Trial:
    """The trial of a search that this process is a part of."""

    folder: str
    attempt: int  #: how often it was started before
    job: str | None  #: as SLURM's commands name it; None outside of SLURM


def trial_here(environ: Mapping[str, str] = os.environ) -> Trial | None:
    """The trial that this process is a part of; None where it is in none."""
    folder = trial_folder(environ)
    return None if folder is None else Trial(folder, slurm.attempt(environ), slurm.job_name(environ))


class Job(Attempts):
    """The SLURM job of this process, and its file ``.lockstep-job-<number>.json``.

    The file says which attempt is the newest and which checkpoint each fit of it wrote last. Ranks that are left over
    from an earlier attempt find there that they have been replaced, and touch no checkpoint any more.

    A trial of a search may be submitted anew, as another job, and goes on with its earlier checkpoints: its file is
    ``.lockstep-trial.json`` in the trial's own folder.

    Args:
        folder: where the file and the checkpoints of :meth:`checkpoint` lie; all nodes see it.
        requeues: whether the job puts itself back into the queue when it is asked to.
        asks: the signals that ask for it.
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

    def told(self, newest: int) -> str:
        what, counted = f"SLURM job {self.number}", "SLURM_RESTART_COUNT"
        if self._trial is not None:
            what, counted = f"the trial in {self._trial}", "starts before this one"
        return (
            f"{what} has been started anew ({counted}={newest}; here it is "
            f"{self.attempt}), and its checkpoints are no longer this process' to write or remove"
        )

    def checkpoint(self, call: int) -> str:
        """Where the run is saved before the job ends; ``call`` counts the fits of this process from 1."""
        return os.path.join(self._folder, f"lockstep-{self._stem}-fit-{call}.ckpt")

    def enter(self, agents: Sequence[str] = ()) -> None:
        known = self.check()
        if self.attempt:
            self.write({**known, "attempt": self.attempt})

    def done(self, call: int) -> None:
        """A fit has come to its end: what is noted of it goes when this process ends in order.

        Until then the job may be stopped and started anew, in a test after the fit say, and would train once more from
        the beginning.
        """
        EXIT_JOB.at_exit(self._forget, call)

    def _forget(self, call: int) -> None:
        """Remove what a fit has left; what guards against earlier attempts stays."""
        if getattr(sys, "last_value", None) is not None:  # the script has failed behind it
            return
        with contextlib.suppress(Superseded):
            known = self.check()
            left = {key: path for key, path in known.get("saved", {}).items() if key != str(call)}
            if storage.exists(self.checkpoint(call)):
                storage.remove(self.checkpoint(call))
            if left or self.attempt:
                self.write({"attempt": self.attempt, "saved": left})
            elif known:
                storage.remove(self.path)

    # -- the end -------------------------------------------------------------------------------------------

    def requeue(self) -> str:
        """Ask SLURM to put this job back into the queue, which ends its processes; gives the reason if it did not."""
        try:
            done = subprocess.run(
                ["scontrol", "requeue", self._name], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"scontrol requeue {self._name}: {error}"
        if done.returncode:
            return f"scontrol requeue {self._name} ended with {done.returncode}: {done.stderr.strip()}"
        log.info("lockstep: SLURM job %s is back in the queue", self._name)
        return ""


def job_here(folder: str, cluster: object = None, environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process is a task of, or the only process of: a batch script of one task may do without srun.

    Args:
        folder: for its file and checkpoints.
        cluster: the user's, a SLURMEnvironment with ``auto_requeue`` and ``requeue_signal`` say; None: as by default.
        environ: the environment.
    """
    if not slurm.is_task(environ) and not slurm.is_only_task(environ):
        return None
    asked = getattr(cluster, "requeue_signal", None)
    asks = (signal.SIGUSR1, signal.SIGUSR2) if asked is None or cluster is None else (asked,)
    return Job(folder, getattr(cluster, "auto_requeue", True), tuple(int(number) for number in asks), environ)


def await_end(seconds: float = LONGEST) -> None:
    """Wait for SLURM to end this process: had it ended by itself, its job would be complete, or failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)


# -- lockstep run --------------------------------------------------------------------------------------------


RUN = "LOCKSTEP_RUN"
"""The variable with the name of a run that may be started anew: the same for the same command."""
AGENT = "LOCKSTEP_AGENT"
"""The variable with a name for the agent that started this rank: it stays over all restarts."""
RESUME = "LOCKSTEP_RESUME"
"""The variable that says ``1`` where the run goes on from what an earlier agent's ranks have saved."""
RECORDS = "LOCKSTEP_RECORDS"
"""The variable with the file in which rank 0 tells its agent where the run's own file is."""


class Run(Attempts):
    """A run that ``lockstep run`` starts anew when a rank has failed; its file: ``.lockstep-run-<name>-<agent>.json``.

    Agents of several nodes count their restarts each for itself, so the file counts the attempts: rank 0 adds one when
    it comes to its first fit. An attempt belongs to the same run as the one before if an agent has started ranks of
    both, or if the command says ``--resume``; then it goes on with the newest file of that name.

    Args:
        folder: where the file and the checkpoints of :meth:`checkpoint` lie; all nodes see it.
        job: the SLURM job around it, which can put the run back into the queue.
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

    def told(self, newest: int) -> str:
        return (
            f"this run has been started anew ({self.path} knows of attempt {newest}; here it is {self.attempt}), and "
            "its checkpoints are no longer this process' to write or remove"
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

    def _newest_saved(self, files: Mapping[str, dict[str, Any]]) -> list[str]:
        """The file of the newest run that has saved anything, if there is one."""
        found = sorted((path for path, known in files.items() if known.get("saved")), key=storage.modified)[-1:]
        if not found:
            log.info(f"lockstep run --resume: no run of this command has left anything in {self._folder!r}")
        return found

    def _find(self, agents: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The run's file, and what it says; where there is none yet, the path that it gets."""
        stem = f".lockstep-run-{self.name}-"
        names = [name for name in storage.names(self._folder) if name.startswith(stem) and name.endswith(".json")]
        files = {path: read(path) for path in (os.path.join(self._folder, name) for name in names)}
        own = [path for path, known in files.items() if set(agents) & set(known.get("agents", []))]
        if not own and self._resumes:
            own = self._newest_saved(files)
        if own:
            return own[0], files[own[0]]
        return os.path.join(self._folder, f"{stem}{self.agent}.json"), {}


_entered: dict[tuple[str, str], Any] = {}
"""The path and the number that this process has in each run: all its fits belong to one attempt."""


def leave_nothing(path: str, done: bool) -> None:
    """Remove what a run keeps for its next attempt: its file, and its own checkpoints.

    Args:
        path: of the file.
        done: whether the run has come to its end; otherwise all stays from which ``--resume`` can go on.
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
    """What this process is an attempt at: a run of ``lockstep run`` that may be started anew, or a SLURM job.

    Args:
        folder: for its file and checkpoints.
        cluster: the user's, as for :func:`lockstep.launch.attempts.job_here`.
        environ: the environment.
    """
    job = job_here(folder, cluster, environ)
    return Run(folder, job, environ) if environ.get(RUN) else job
