"""Handling of SIGTERM and SLURM's signals in a fit, and periodic saves of runs that may be restarted."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lockstep.checkpoint import storage
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.launch.attempts import Attempts, attempts_here, await_end
from lockstep.loop import state
from lockstep.loop.session import Session
from lockstep.loop.state_checks import load_weights
from lockstep.supervise.signals import by_default, end_at_once, handling, is_under_lockstep, send_again
from lockstep.supervise.status import is_ending

TERMINATED = "SIGTERM"
"""Value of ``trainer.interruption`` after SIGTERM."""

AGAIN = 1.0
"""Seconds after which a second SIGTERM counts as a new signal. Schedulers send it twice within milliseconds."""

DUE = -1
"""Value in place of a signal's number: save the run and continue."""

OFTEN = 600.0
"""Seconds between saves of a run that may be restarted, if no callback saves checkpoints."""


@contextmanager
def ignore_requeue_signals(session: Session) -> Iterator[None]:
    """Ignore SLURM's requeue signals during an evaluation, which has nothing to save."""
    job = attempts_here(session.config.default_root_dir, session.cluster)
    with handling(() if job is None else job.asks, lambda number: None):
        yield


_fits = itertools.count(1)
"""Numbers the fits of this process, so that each fit continues from its own checkpoint in the next attempt."""


class Signals:
    """Handler of SIGTERM and SLURM's signals in one fit. It also saves runs that may be restarted.

    A handler only records the signal. The ranks agree on it with the other flags (`lockstep.ground.agreement`), and act
    at the same boundary:

    - SIGTERM ends the fit in order, as Ctrl-C does, and then the process with code 143. After a failure, the second
      time, or before the rendezvous, it ends the process at once.
    - In a task of a SLURM job, or its batch script of one task, the run is saved first. After SIGUSR1 and SIGUSR2
      rank 0 requeues the job, and all wait for SLURM to end them. The job's next attempt continues from there. If
      SLURM refuses, the fit continues.
    - A run that ``lockstep run`` may restart is saved at SIGTERM before it ends, and when the fit has ended. If no
      callback saves it, it is also saved at the end of every epoch and every ten minutes.

    Args:
        session: session before its fit.

    Attributes:
        ending: result of this fit if it ended in an earlier attempt; then it does not run again.
        is_later_attempt: True if the fit continues from a checkpoint of an earlier attempt under ``lockstep run``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.call = next(_fits)
        self.job: Attempts | None = attempts_here(session.config.default_root_dir, session.cluster)
        if self.job is not None and self.job.is_kept and session.config.fast_dev_run:
            self.job = None
        self.requested = 0
        self.failing = False
        self.ending: dict[str, Any] | None = None
        self.is_later_attempt = False
        self._unhandled = 0  # the last signal that has not been handled
        self._keeps = False
        self._clock: threading.Timer | None = None
        self._flag = 0
        self._at = 0.0

    @contextmanager
    def handle(self) -> Iterator[None]:
        """Handle signals in the ``with`` block; after the block, resend a SIGTERM that the fit did not handle."""
        asks = () if self.job is None else self.job.asks
        numbers = asks if is_under_lockstep() else (*asks, int(signal.SIGTERM))
        try:
            with handling(numbers, self._note, shared=(signal.SIGTERM,)):  # the script's own handler, to end in order
                yield
        finally:
            if self._clock is not None:
                self._clock.cancel()
        if self.requested == signal.SIGTERM:
            send_again(signal.SIGTERM)

    def _note(self, number: int) -> None:
        """Record a signal. Runs in the signal handler, where waiting and writing are not safe."""
        if number == signal.SIGTERM:
            self.session.received_sigterm = True
            waits = self.job is not None and self.job.requeues
            again = self.requested == number and time.monotonic() - self._at > AGAIN and not waits
            # no boundary will follow
            if self.failing or again or not self.session.strategy.has_met or is_ending():
                end_at_once()
            self._at = self._at if self.requested == number else time.monotonic()
        if self.requested != signal.SIGTERM:
            self._unhandled = self.requested = number

    def _due(self) -> None:
        """Request a save of the run at a later boundary. May be called from any thread."""
        if self.requested == 0:
            self.requested = DUE
            if self._unhandled:  # a signal has arrived between these lines
                self.requested = self._unhandled

    # -- before the loop -----------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Register the flag for signals and start the clock for saves, once the ranks are connected."""
        session = self.session
        self._flag = session.agreement.register("signal")
        self._keeps = self.job is not None and self.job.is_kept and not any(map(_saves, session.callbacks))
        self._restart_clock()

    def _restart_clock(self) -> None:
        """On rank 0, restart the timer for the next save."""
        if self._clock is not None:
            self._clock.cancel()
        if self._keeps and self.session.is_global_zero:
            self._clock = threading.Timer(OFTEN, self._due)
            self._clock.daemon = True
            self._clock.start()

    def resume_from(self, asked: str | None) -> str | None:
        """Return the newest checkpoint of earlier attempts at this run; ``asked`` if there is none or on ranks above 0.

        Collective under ``lockstep run``.
        """
        job, strategy = self.job, self.session.strategy
        if job is None:
            return asked
        strategy.checkpoints.before_touching = job.check
        agents = strategy.gather_objects(job.agent) if job.agent else []
        path = None
        if self.session.is_global_zero:
            job.enter(agents)
            strategy.checkpoints.after_saving = lambda path: job.saved(storage.absolute(path), self.call)
            path = job.newest(self.call)
        if job.agent:
            claim, self.is_later_attempt = strategy.broadcast((job.claim(), path is not None))
            job.join(claim)
        if path is not None:
            rank_zero_info(f"{job}: the fit continues from {path}")
        return asked if path is None else path

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """If this fit already ended in an earlier attempt at the run, load its result and weights."""
        ended = checkpoint.get(state.OWN, {}).get("ended") if self.is_later_attempt else None
        if ended is not None:
            rank_zero_info(f"{self.job}: this fit ended in an earlier attempt, so it is not run again")
            self.ending = ended["result"]
            load_weights(self.session, ended["weights"])

    # -- at a boundary -------------------------------------------------------------------------------------

    def request(self) -> None:
        """Set this rank's signal and interruption flags, which all ranks read at a later boundary."""
        session = self.session
        session.agreement.request(self._flag)
        session.agreement.request(session.interrupt_flag)

    def act(self) -> None:
        """Handle the signals that the ranks received: save, requeue, or request the end of the fit.

        Returns without effect after Ctrl-C. Collective if the ranks have agreed on the interruption.
        """
        session, job = self.session, self.job
        if session.world_size > 1 and not session.agreement.now(self._flag):
            return  # Ctrl-C
        # ranks may have received different ones: the one that ends the run counts
        received = session.strategy.gather_objects(self.requested)
        number = signal.SIGTERM if signal.SIGTERM in received else max(0, *received)
        session.received_sigterm = session.received_sigterm or number == signal.SIGTERM
        for flag in (self._flag, session.interrupt_flag):
            session.agreement.lower(flag)
        if job is not None and number == 0 and DUE in received:
            self._save(job)
            self._restart_clock()
        elif job is not None and job.saves and number:
            number = self._save_and_requeue(job, number)
        self.requested = self._unhandled = 0
        if number == signal.SIGTERM:
            session.interruption, session.should_stop = TERMINATED, True
            session.agreement.request(session.interrupt_flag)
            session.agreement.now(session.interrupt_flag)

    def _save(self, job: Attempts, also: Callable[[dict[str, Any]], None] | None = None) -> None:
        state.save(self.session, job.checkpoint(self.call), also=also)
        state.finish(self.session)
        for logger in self.session.loggers:
            logger.save()

    def _save_and_requeue(self, job: Attempts, number: int) -> int:
        """Save, requeue the job and wait for its end. Return the signal's number, or 0 if SLURM refused to requeue."""
        name = signal.Signals(number).name
        rank_zero_info(f"{name}: all ranks save to {job.checkpoint(self.call)}")
        self._save(job)
        refused = self._requeue_and_wait(job, number) if job.requeues else None
        if refused is None:
            return number
        rank_zero_warn(f"{name}: the run is saved and continues, because the job was not requeued: {refused}")
        return 0

    def _requeue_and_wait(self, job: Attempts, number: int) -> str | None:
        """Requeue the job and wait for its end. Return SLURM's reason if it refused; None if the wait timed out."""
        # SLURM's SIGTERM may arrive before scontrol returns, and has to end ranks that wait for rank 0, too
        with by_default(signal.SIGTERM):
            refused = ""
            if number != signal.SIGTERM:
                if self.session.is_global_zero:
                    refused = job.requeue()
                try:
                    refused = self.session.strategy.broadcast(refused)
                except RuntimeError:  # rank 0 has been ended, as this one will be
                    refused = ""
            if refused:
                return refused
            await_end()
            return None

    def epoch_ended(self) -> None:
        """Request a save at the end of an epoch if no callback saves the run."""
        if self._keeps:
            self._due()

    # -- after the loop ------------------------------------------------------------------------------------

    def save_result(self, result: dict[str, Any]) -> None:
        """Save the result of a finished fit, so that a later attempt does not repeat the fit. Collective."""
        job = self.job
        if job is None or not job.is_kept or self.ending is not None:
            return
        session = self.session
        weights = session.strategy.save(weights_only=True).module

        def add(checkpoint: dict[str, Any]) -> None:
            # a callback may have replaced the weights of "state_dict", for example by those before its average. Mostly
            # these are the same tensors, which the file holds once
            checkpoint[state.OWN]["ended"] = {"result": result, "weights": weights}

        self._save(job, add)
        session.strategy.checkpoints.after_saving = None  # later checkpoints of the script are not the loop's

    def record_end(self) -> None:
        """Record in the job's files that the fit has ended."""
        if self.job is not None and self.session.is_global_zero:
            self.job.done(self.call)


def _saves(callback: Callback) -> bool:
    """Return True if a callback regularly writes checkpoints from which a fit can resume."""
    if not isinstance(callback, Checkpoint) or isinstance(callback, OnExceptionCheckpoint):
        return False
    kept = getattr(callback, "save_top_k", -1) != 0 or getattr(callback, "save_last", None)
    return bool(kept) and not getattr(callback, "save_weights_only", False)
