"""Conditions that end a fit: its limits, requested stops, Ctrl-C and signals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lockstep.ground.rank import does
from lockstep.loop.session import Session
from lockstep.loop.signals import TERMINATED
from lockstep.loop.state import best_of


@dataclass(frozen=True)
class Result:
    """Result of a fit, identical on all ranks.

    Attributes:
        stopped: the reason why the fit ended, for example ``max_epochs=5 reached``.
        metrics: newest value of each logged name.
        best_model_path: path of the best checkpoint; "" if there is none.
        best_model_score: the monitored value of that checkpoint.
        epochs: number of finished epochs.
        global_step: number of optimizer steps, including those before a resume.
        interrupted: True if Ctrl-C or SIGTERM ended the fit.

    Example::

        result = trainer.fit(model)
        print(result.stopped, result.global_step, result.metrics["val_loss"])
    """

    stopped: str
    metrics: dict[str, float] = field(default_factory=dict)
    best_model_path: str = ""
    best_model_score: float | None = None
    epochs: int = 0
    global_step: int = 0
    interrupted: bool = False


class FitEnding:
    """Check after each accumulation window and each epoch if the fit ends, with the same result on all ranks.

    Attributes:
        reason: why the fit ends; None while it continues.
        had_no_batches: True if the last epoch had no batches.
        most_steps: ``max_steps`` in this epoch; infinite without a limit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.start()

    def start(self) -> None:
        """Reset the limits and the reason to stop before a new fit."""
        self.reason: str | None = None
        self.had_no_batches = False
        self._has_reported = False  # that a stop waits for `min_epochs` and `min_steps`
        self.most_steps: float = math.inf

    def start_epoch(self) -> None:
        """Read ``max_steps`` once per epoch, because a hook may have changed it."""
        most = self._session.config.max_steps
        self.most_steps = math.inf if most == -1 else most

    # -- at a boundary -------------------------------------------------------------------------------------

    def after_window(self) -> bool:
        """Handle stop requests and signals that arrived during a window; return True if the fit ends here.

        Called only if there is a request, possibly on one rank alone. So it is collective only for flags that all
        ranks have agreed on.
        """
        session = self._session
        stop = session.should_stop or session.fit.progress.global_step >= self.most_steps
        if session.world_size > 1:
            up = session.agreement.up
            interrupted = session.interrupt_flag in up
            stop = stop or session.stop_flag in up
            if session.not_finite_flag in up:
                session.fit.finite.raise_or_warn()
        else:
            interrupted = False if session.signals is None else session.signals.requested != 0
            if session.fit.finite.has_found:
                session.fit.finite.raise_or_warn()
        if interrupted:
            self.act_on_signals()
            stop = True
        return stop and self.in_epoch() is not None

    def act_on_signals(self) -> None:
        """Handle a received signal once the request to interrupt has reached all ranks. Collective in that case."""
        session, signals = self._session, self._session.signals
        if signals is None:
            return
        if session.agreement.is_up(session.interrupt_flag) if session.world_size > 1 else signals.requested:
            signals.act()

    def check_clock(self, most: float) -> None:
        """Request a stop on rank 0 once a fit has run for ``most`` seconds. All ranks stop after the same window."""
        # one clock decides, since those of several ranks run out at different windows
        if self._session.fit.seconds() >= most and self._session.is_global_zero:
            self._session.should_stop = True
            self.reason = f"max_time={most:g} s reached"

    def in_epoch(self) -> str | None:
        """Return the reason to end the fit within an epoch, or None."""
        session, config = self._session, self._session.config
        # steps are the same on all ranks, so this needs no agreement
        if config.max_steps != -1 and session.fit.progress.global_step >= config.max_steps:
            return f"max_steps={config.max_steps} reached"
        interrupted = session.interrupted
        if interrupted or (session.stop_requested and self.may_stop_early()):
            session.should_stop = True
            if interrupted:
                session.interruption = session.interruption or "Ctrl-C on another rank"
            return self.reason or self._early_reason()
        return None

    def between_epochs(self) -> str | None:
        """Return the reason to end the fit before its next epoch, or None. Collective."""
        config, session = self._session.config, self._session
        reason: str | None
        if session.fit.loaded.num_batches == 0:
            reason = "no training batches"
        elif config.max_epochs != -1 and session.fit.progress.epoch >= config.max_epochs:
            reason = f"max_epochs={config.max_epochs} reached"
        else:
            session.agree_on_ending()
            self.act_on_signals()
            reason = self.in_epoch()
            if reason is None and self.had_no_batches and config.max_epochs == -1 and config.max_time is None:
                # an exhausted stream gives empty epochs, which no limit would ever end
                epoch = session.fit.progress.epoch - 1
                reason = f"epoch {epoch} had no training batches, and there is no limit of epochs"
        if reason is not None:
            self.reason = reason
        return reason

    def may_stop_early(self) -> bool:
        """Return True if min_epochs and min_steps allow a requested stop. Log a message for the first delayed stop."""
        config, progress = self._session.config, self._session.fit.progress
        long_enough = progress.epoch >= config.min_epochs and progress.global_step >= config.min_steps
        if not long_enough and not self._has_reported:
            self._has_reported = True
            least = f"min_epochs={config.min_epochs} and min_steps={config.min_steps}"
            self._session.report(f"trainer.fit: a stop was requested; training continues until {least} are reached.")
        return long_enough

    # -- the reason ----------------------------------------------------------------------------------------

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
        """Broadcast from rank 0 the reason why the fit ends. Collective."""
        session = self._session
        if session.world_size > 1:
            # only rank 0 has the reason of its clock, and only some ranks that of a callback
            self.reason = session.strategy.broadcast(self.reason)
            if not session.interrupted:
                session.interruption = None  # Ctrl-C came after the last boundary

    def result(self) -> Result:
        """Return the `Result` of the fit."""
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
