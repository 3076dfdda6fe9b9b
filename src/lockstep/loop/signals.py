"""Signals to a fit: heard by a rank or several, agreed on, and acted on by all together at a boundary."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.checkpoint import storage
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.launch.heed import end_at_once, heeding, is_under_lockstep, send_again, unheeded
from lockstep.launch.requeue import Job, await_end, job_here
from lockstep.loop import state

TERMINATED = "SIGTERM"
"""What ``trainer.interruption`` says of a fit that SIGTERM has ended."""

AGAIN = 1.0
"""Seconds after which a second SIGTERM is no echo of the first: schedulers send it twice within milliseconds."""


@contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """Have the signals that ask a job to requeue end nothing while a module is evaluated: there is nothing to save."""
    job = job_here(trainer.default_root_dir, trainer._cluster)
    with heeding(() if job is None else job.asks, lambda number: None):
        yield


_fits = itertools.count(1)
"""Numbers the fits of this process: in the job's next attempt each goes on from its own checkpoint."""


class Signals:
    """The signals of one fit.

    A handler only notes what came. What is wanted travels with the other flags (`lockstep.ground.agreement`), and all
    ranks act at the same boundary:

    - SIGTERM ends the fit in order, as Ctrl-C does, and then the process with code 143. After a failure, or the second
      time, it ends the process at once.
    - In a task of a SLURM job the run is saved first. SIGUSR1 and SIGUSR2 have rank 0 put the job back into the queue
      (SIGTERM says that SLURM has decided already), and all wait for SLURM to end them. The job's next attempt goes on
      from there. If SLURM refuses, the fit goes on.

    Args:
        trainer: before its fit.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.call = next(_fits)
        self.job: Job | None = job_here(trainer.default_root_dir, trainer._cluster)
        self.asked = 0
        self.failing = False
        self._flag = 0
        self._at = 0.0

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Hear of signals while the fit runs; SIGTERM that came too late for its last boundary is sent again."""
        asks = () if self.job is None else self.job.asks
        numbers = asks if is_under_lockstep() else (*asks, int(signal.SIGTERM))
        with heeding(numbers, self._note):
            yield
        if self.asked == signal.SIGTERM:
            send_again(signal.SIGTERM)

    def _note(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.trainer.received_sigterm = True
            again = self.asked == number and time.monotonic() - self._at > AGAIN and self.job is None
            if self.failing or again:
                end_at_once()
            self._at = self._at if self.asked == number else time.monotonic()
        if self.asked != signal.SIGTERM:
            self.asked = number

    # -- before the loop -----------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Take a flag of the run's agreement; its ranks are connected."""
        self._flag = self.trainer.agreement.register("signal")

    def resume_from(self, asked: Any) -> Any:
        """On rank 0: what an earlier attempt at this job saved last, which goes before what the script asks for."""
        job, strategy = self.job, self.trainer.strategy
        if job is None:
            return asked
        strategy.before_touching = job.check
        if not self.trainer.is_global_zero:
            return asked
        job.enter()
        strategy.after_saving = lambda path: job.saved(storage.absolute(path), self.call)
        path = job.newest(self.call)
        if path is not None:
            rank_zero_info(f"SLURM job {job.number}, attempt {job.attempt + 1}: the fit goes on from {path}")
        return asked if path is None else path

    # -- at a boundary -------------------------------------------------------------------------------------

    def request(self) -> None:
        """Tell the agreement what this rank has heard: that the fit is interrupted, and that a signal has done it."""
        trainer = self.trainer
        trainer.agreement.request(self._flag)
        trainer.agreement.request(trainer.interrupt_flag)

    def act(self) -> None:
        """Do what was asked for, if it was a signal; comes back if the fit goes on, or is to end in order.

        Collective, where the fit is interrupted on all ranks.
        """
        trainer, job = self.trainer, self.job
        if trainer.world_size > 1 and not trainer.agreement.now(self._flag):
            return  # Ctrl-C
        heard = trainer.strategy.gather_objects(self.asked)
        number = signal.SIGTERM if signal.SIGTERM in heard else next(filter(None, heard), 0)
        name = signal.Signals(number).name if number else "a signal"
        trainer.received_sigterm = trainer.received_sigterm or number == signal.SIGTERM
        for flag in (self._flag, trainer.interrupt_flag):
            trainer.agreement.lower(flag)
        if job is not None and job.requeues and number:
            self._save(job, name)
            refused = self._leave(job, number)
            if refused is not None:
                rank_zero_warn(f"{name}: the run is saved, and goes on, for the job was not requeued: {refused}")
                self.asked = 0
                return
        self.asked = 0
        if number == signal.SIGTERM:
            trainer.interruption, trainer.should_stop = TERMINATED, True
            trainer.agreement.request(trainer.interrupt_flag)
            trainer.agreement.now(trainer.interrupt_flag)

    def _save(self, job: Job, name: str) -> None:
        path = job.checkpoint(self.call)
        rank_zero_info(f"{name}: all ranks save to {path}")
        state.save(self.trainer, path)
        state.finish(self.trainer)
        for logger in self.trainer.loggers:
            logger.save()

    def _leave(self, job: Job, number: int) -> str | None:
        """Wait to be ended; gives the reason if the job was not requeued, None where it is time to end by oneself."""
        with unheeded(signal.SIGTERM):  # it comes before scontrol returns, and ends a rank that waits for rank 0, too
            refused = ""
            if number != signal.SIGTERM:
                if self.trainer.is_global_zero:
                    refused = job.requeue()
                try:
                    refused = self.trainer.strategy.broadcast(refused)
                except RuntimeError:  # rank 0 has been ended, as this one will be
                    refused = ""
            if refused:
                return refused
            await_end()
            return None

    # -- after the loop ------------------------------------------------------------------------------------

    def done(self) -> None:
        """The fit has come to its end."""
        if self.job is not None and self.trainer.is_global_zero:
            self.job.done(self.call)
