"""When a fit ends, and why: its limits, a stop that somebody asks for, Ctrl-C, and signals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lockstep.ground.rank import does
from lockstep.loop.fit_messages import say
from lockstep.loop.session import Session
from lockstep.loop.signals import TERMINATED
from lockstep.loop.state import best_of


@dataclass(frozen=True)
class Result:
    """How a fit ended; the same on one process and on many.

    Attributes:
        stopped: why it ended, in words: ``max_epochs=5 reached``.
        metrics: newest value of everything that was logged.
        best_model_path: the best checkpoint, "" where none was kept.
        best_model_score: the monitored value of that checkpoint.
        epochs: epochs that were finished.
        global_step: optimizer steps, those before a resume included.
        interrupted: whether Ctrl-C ended it.
    """

    stopped: str
    metrics: dict[str, float] = field(default_factory=dict)
    best_model_path: str = ""
    best_model_score: float | None = None
    epochs: int = 0
    global_step: int = 0
    interrupted: bool = False


class FitEnding:
    """Decides at each boundary whether a fit ends. On several ranks only what all have agreed on counts.

    Attributes:
        reason: why the fit ends, in words; None while it does not.
        had_no_batches: the last epoch had none.
        most_steps: ``max_steps`` of this epoch; infinite where there is no limit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.start()

    def start(self) -> None:
        """Forget the fit before."""
        self.reason: str | None = None
        self.had_no_batches = False
        self._has_warned = False  # that a stop waits for the least number of epochs and steps
        self.most_steps: float = math.inf

    def start_epoch(self) -> None:
        """Read the limit that is looked at after each window: a hook may have set it."""
        most = self._session.config.max_steps
        self.most_steps = math.inf if most == -1 else most

    # -- at a boundary -------------------------------------------------------------------------------------

    def after_window(self) -> bool:
        """Act on what has come since the last window; return True if the fit ends here.

        To be called where something has come: on one rank alone it is no collective, since nothing is agreed on then.
        """
        session = self._session
        stop = session.should_stop or session.fit.progress.global_step >= self.most_steps
        if session.world_size > 1:
            up = session.agreement.up
            interrupted = session.interrupt_flag in up
            stop = stop or session.stop_flag in up
            if session.not_finite_flag in up:
                session.fit.finite.judge()
        else:
            interrupted = False if session.signals is None else session.signals.asked != 0
            if session.fit.finite.has_found:
                session.fit.finite.judge()
        if interrupted:
            self.act_on_signals()
            stop = True
        return stop and self.in_epoch() is not None

    def act_on_signals(self) -> None:
        """Act on a signal that all ranks know of, between windows. Collective where one has interrupted the fit."""
        session, signals = self._session, self._session.signals
        if signals is None:
            return
        if session.agreement.is_up(session.interrupt_flag) if session.world_size > 1 else signals.asked:
            signals.act()

    def look_at_clock(self, most: float) -> None:
        """Stop after ``most`` seconds by rank 0's clock; the other ranks learn of it at a boundary."""
        if self._session.fit.seconds() >= most and self._session.is_global_zero:
            self._session.should_stop = True
            self.reason = f"max_time={most:g} s reached"

    def in_epoch(self) -> str | None:
        """Return why the fit ends within an epoch; None if it does not."""
        session, config = self._session, self._session.config
        if config.max_steps != -1 and session.fit.progress.global_step >= config.max_steps:
            return f"max_steps={config.max_steps} reached"
        interrupted = session.interrupted
        if interrupted or (session.stop_asked and self.may_stop_early()):
            session.should_stop = True
            if interrupted:
                session.interruption = session.interruption or "Ctrl-C on another rank"
            return self.reason or self._early_reason()
        return None

    def between_epochs(self) -> str | None:
        """Return why the fit ends before its next epoch; None if it does not. Collective."""
        config, session = self._session.config, self._session
        reason: str | None
        if session.fit.loaded.num_batches == 0:
            reason = "no training batches"
        elif config.max_epochs != -1 and session.fit.progress.epoch >= config.max_epochs:
            reason = f"max_epochs={config.max_epochs} reached"
        else:
            session.agree_on_ending()
            self.act_on_signals()
            reason = self.in_epoch() or self._spins()
        if reason is not None:
            self.reason = reason
        return reason

    def _spins(self) -> str | None:
        """Why a fit ends that nothing else would end: its loader gives no batches any more."""
        config = self._session.config
        if not self.had_no_batches or config.max_epochs != -1 or config.max_time is not None:
            return None
        epoch = self._session.fit.progress.epoch - 1
        return f"epoch {epoch} had no training batches, and there is no limit of epochs"

    def may_stop_early(self) -> bool:
        """Return True if a stop that somebody asks for ends the fit; print once that it does not yet."""
        config, progress = self._session.config, self._session.fit.progress
        long_enough = progress.epoch >= config.min_epochs and progress.global_step >= config.min_steps
        if not long_enough and not self._has_warned:
            self._has_warned = True
            least = f"min_epochs={config.min_epochs} and min_steps={config.min_steps}"
            say(self._session, f"trainer.fit: a stop was asked for, and training goes on until {least} are reached.")
        return long_enough

    # -- why -----------------------------------------------------------------------------------------------

    def _early_reason(self) -> str:
        if self._session.interruption is not None:
            return self._interruption()
        for callback in self._session.callbacks:
            message = getattr(callback, "stopping_reason_message", None)  # EarlyStopping has one, and Timer
            if message:
                return f"{type(callback).__name__}: {message.rstrip('.')}"
        return "trainer.should_stop was set"

    def _interruption(self) -> str:
        return f"interrupted by {TERMINATED if self._session.interruption == TERMINATED else 'Ctrl-C'}"

    @does("ending the fit")
    def share(self) -> None:
        """Make all ranks report the same: rank 0's clock may have ended the fit, or Ctrl-C on one rank. Collective."""
        session = self._session
        if session.world_size > 1:
            self.reason = session.strategy.broadcast(self.reason)
            if not session.interrupted:
                session.interruption = None  # it came when all was over

    def result(self) -> Result:
        """How the fit ended."""
        session = self._session
        best = best_of(session)
        score = getattr(best, "best_model_score", None)
        return Result(
            stopped=self._interruption() if session.interruption is not None else self.reason or "",
            metrics={name: float(value) for name, value in session.callback_metrics().items()},
            best_model_path=str(getattr(best, "best_model_path", "") or ""),
            best_model_score=None if score is None else float(score),
            epochs=session.fit.progress.epoch,
            global_step=session.fit.progress.global_step,
            interrupted=session.interruption is not None,
        )
