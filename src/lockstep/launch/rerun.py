"""A run of ``lockstep run``, as its ranks see it: its attempts, and what is kept so that the next one goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint import storage
from lockstep.ground.rank import log
from lockstep.launch.attempts import Attempts, read
from lockstep.launch.requeue import Job, job_here

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

    def claim(self) -> Any:
        return self.path, self.attempt

    def join(self, claim: Any) -> None:
        self.path, self.attempt = _entered[self._folder, self.name] = claim

    def newest(self, call: int) -> str | None:
        return super().newest(call) if self.attempt > 1 else None

    def requeue(self) -> str:
        assert self._job is not None
        return self._job.requeue()

    def _find(self, agents: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The run's file, and what it says; where there is none yet, the path that it gets."""
        stem = f".lockstep-run-{self.name}-"
        names = [name for name in storage.names(self._folder) if name.startswith(stem) and name.endswith(".json")]
        files = {path: read(path) for path in (os.path.join(self._folder, name) for name in names)}
        own = [path for path, known in files.items() if set(agents) & set(known.get("agents", []))]
        if not own and self._resumes:
            own = sorted((path for path, known in files.items() if known.get("saved")), key=storage.modified)[-1:]
            if not own:
                log.info(f"lockstep run --resume: no run of this command has left anything in {self._folder!r}")
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


def attempts_here(folder: str, cluster: Any = None, environ: Mapping[str, str] = os.environ) -> Attempts | None:
    """What this process is an attempt at: a run of ``lockstep run`` that may be started anew, or a SLURM job.

    Args:
        folder: for its file and checkpoints.
        cluster: the user's, as for :func:`lockstep.launch.requeue.job_here`.
        environ: the environment.
    """
    job = job_here(folder, cluster, environ)
    return Run(folder, job, environ) if environ.get(RUN) else job
