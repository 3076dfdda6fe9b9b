"""A SLURM job as the run sees it: which attempt this is, what the last one left, and back into the queue."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint import storage
from lockstep.cluster import slurm
from lockstep.cluster.base import read_number
from lockstep.ground.rank import log
from lockstep.launch.attempts import Attempts, Superseded

LONGEST = 600.0
"""Seconds that a rank which has saved waits for SLURM to end it."""


class Job(Attempts):
    """The SLURM job of this process, and its file ``.lockstep-job-<number>.json``.

    The file says which attempt is the newest and which checkpoint each fit of it wrote last. Ranks that are left over
    from an earlier attempt find there that they have been replaced, and touch no checkpoint any more.

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
        super().__init__(os.path.join(folder, f".lockstep-job-{self.number}.json"), slurm.attempt(environ))
        self.requeues = self.saves = requeues
        self.asks = asks if requeues else ()
        array = environ.get("SLURM_ARRAY_JOB_ID")
        self._name = self.number if array is None else f"{array}_{read_number(environ, 'SLURM_ARRAY_TASK_ID')}"
        self._folder = folder

    def __str__(self) -> str:
        return f"SLURM job {self.number}, attempt {self.attempt + 1}"

    def told(self, newest: int) -> str:
        return (
            f"SLURM job {self.number} has been started anew (SLURM_RESTART_COUNT={newest}; here it is "
            f"{self.attempt}), and its checkpoints are no longer this process' to write or remove"
        )

    def checkpoint(self, call: int) -> str:
        """Where the run is saved before the job ends; ``call`` counts the fits of this process from 1."""
        return os.path.join(self._folder, f"lockstep-job-{self.number}-fit-{call}.ckpt")

    def enter(self, agents: Sequence[str] = ()) -> None:
        known = self.check()
        if self.attempt:
            self.write({**known, "attempt": self.attempt})

    def done(self, call: int) -> None:
        """A fit has come to its end: what is noted of it goes when this process ends in order.

        Until then the job may be stopped and started anew, in a test after the fit say, and would train once more from
        the beginning.
        """
        atexit.register(self._forget, call)

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


def job_here(folder: str, cluster: Any = None, environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process is a task of; None elsewhere.

    Args:
        folder: for its file and checkpoints.
        cluster: the user's, a SLURMEnvironment with ``auto_requeue`` and ``requeue_signal`` say; None: as by default.
        environ: the environment.
    """
    if not slurm.is_task(environ):
        return None
    asked = getattr(cluster, "requeue_signal", None)
    asks = (signal.SIGUSR1, signal.SIGUSR2) if asked is None or cluster is None else (asked,)
    return Job(folder, getattr(cluster, "auto_requeue", True), tuple(int(number) for number in asks), environ)


def await_end(seconds: float = LONGEST) -> None:
    """Wait for SLURM to end this process: had it ended by itself, its job would be complete, or failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)
