"""The fit: epochs of windows; when to validate, save and stop."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.seed import isolate_rng
from lockstep.ground.states import RunningStage, TrainerFn
from lockstep.loop import state
from lockstep.loop.data import Feed
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.progress import BATCH_END, EPOCH_END, EPOCH_START, WINDOW_END, Progress
from lockstep.loop.results import Results
from lockstep.loop.session import session
from lockstep.loop.step import Step


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


class FitLoop:
    """Epochs of windows.

    As pseudo-code::

        set up; sanity check; on_train_start
        until done:
            on_train_epoch_start
            for window in feed:
                for each micro-batch of step.window(window):     # see loop/step.py
                    log, validate, stop where due
            reduce the epoch's metrics; on_train_epoch_end; plateau schedulers; log
        on_train_end; tear down
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.progress = Progress()
        self.step = Step(trainer)
        self.validation = EvaluationLoop(trainer, RunningStage.VALIDATING)
        self.feed: Feed | None = None
        self.given: Any = None  # the training loaders as the user made them
        self.results: Results | None = None
        self.resumed: dict[str, Any] | None = None  # this rank's part of the checkpoint, until training goes on
        self._started = 0.0
        self._reason: str | None = None
        self._stops = False
        self._time_limit: float | None = None
        self._most_steps = math.inf

    # -- the fit -------------------------------------------------------------------------------------------

    def run(self, ckpt_path: Any = None, weights_only: bool | None = None) -> Result:
        """Fit the trainer's module; returns how it ended."""
        trainer = self.trainer
        self.progress, self.feed, self.resumed, self._reason = Progress(), None, None, None
        trainer.should_stop = False
        self._time_limit = trainer.config.max_time
        self._most_steps = math.inf if trainer.config.max_steps == -1 else trainer.config.max_steps
        self._started = time.monotonic()
        with session(trainer, TrainerFn.FITTING, ckpt_path, weights_only), self._anomalies():
            self.results = trainer.results
            self.step.setup()
            self._sanity_check()
            trainer.state.stage = RunningStage.TRAINING
            self.setup_data()
            if self._done() is None:
                if self._validates:
                    self.validation.setup_data()
                trainer.hooks.call("on_train_start")
                self._restore_randomness()
                while self._done() is None:
                    self.epoch()
                trainer.hooks.call("on_train_end")
            self._share_ending()
        return self._result()

    def _anomalies(self) -> Any:
        detect = self.trainer.config.detect_anomaly
        return torch.autograd.set_detect_anomaly(True) if detect else nullcontext()

    def setup_data(self) -> None:
        """Ask for the training loaders and share them over the ranks; does nothing the second time."""
        if self.feed is not None:
            return
        trainer, config = self.trainer, self.trainer.config
        self.given = trainer.loaders.request("train")
        self.feed = Feed.train(
            self.given,
            world=trainer.strategy.world,
            seed=trainer.seed,
            limit=config.limit_train_batches,
            distribute=config.use_distributed_sampler,
            order="torch" if config.order == "torch" else "keyed",
        )
        batches = self.feed.num_batches
        self._validate_every = _validation_interval(config, batches)
        if trainer.loggers and not config.fast_dev_run and batches < config.log_every_n_steps:
            rank_zero_warn(
                f"An epoch has {batches} training batches, fewer than Trainer(log_every_n_steps="
                f"{config.log_every_n_steps}): give it a lower value to see values of single steps."
            )

    def epoch(self) -> None:
        """One epoch, or what is left of it after a resume."""
        trainer, progress, feed, step = self.trainer, self.progress, self.feed, self.step
        assert feed is not None
        whole = progress.phase == EPOCH_END
        if progress.phase == EPOCH_START:
            progress.batch = 0
            trainer.hooks.call("on_train_epoch_start")
        if not whole:
            accumulate = trainer.config.accumulation(progress.epoch)
            log_every, validates = trainer.config.log_every_n_steps, self._validates
            feed.begin(progress.epoch, progress.batch)
            trainer.results.enter("training_step")
            whole = progress.phase != EPOCH_START and self._go_on_after_batch(accumulate)
            windows = iter(()) if whole or self._done_in_epoch() else feed.windows(accumulate)
            for window in windows:
                left = window.size
                for _ in step.window(window, progress.batch):
                    left -= 1
                    if not left:
                        if self._time_limit is not None:
                            self._look_at_clock()
                        if log_every and (progress.windows + 1) % log_every == 0:
                            self._log_step()
                    if validates and self._validation_due(not left):
                        self._validate(not left)
                if step.ended_by_user:
                    step.ended_by_user, whole = False, True
                    break
                self._after_window()
                whole = progress.last
                if self._stops:
                    break
        self._end_epoch(whole)

    def _go_on_after_batch(self, accumulate: int) -> bool:
        """Do what was still to come after the batch of the checkpoint; tells whether it was the last one."""
        progress, feed = self.progress, self.feed
        assert feed is not None
        progress.last = progress.last or progress.batch >= feed.num_batches
        at_end = progress.last or progress.batch % accumulate == 0
        if progress.phase == BATCH_END and self._validates and self._validation_due(at_end):
            self._validate(at_end)
        if at_end and progress.phase != WINDOW_END:
            self._after_window()
        return progress.last

    def _after_window(self) -> None:
        """At a boundary: schedulers that watch a metric, and whether the fit stops here."""
        progress, trainer = self.progress, self.trainer
        if self.step.plateau_by_step:
            self.step.step_plateau("step", progress.batch)
        progress.windows += 1
        progress.phase = WINDOW_END
        stop = trainer.should_stop or progress.global_step >= self._most_steps
        if self.step.shared and not stop:
            agreement = trainer.agreement
            stop = agreement.is_up(trainer.stop_flag) or agreement.is_up(trainer.interrupt_flag)
        self._stops = stop and self._done_in_epoch() is not None

    def _look_at_clock(self) -> None:
        assert self._time_limit is not None
        if self.seconds() >= self._time_limit and self.trainer.is_global_zero:
            self.trainer.should_stop = True  # rank 0's clock; the others learn of it at a boundary
            self._reason = f"max_time={self._time_limit:g} s reached"

    def _end_epoch(self, whole: bool) -> None:
        trainer, progress, hooks, results = self.trainer, self.progress, self.trainer.hooks, self.trainer.results
        results.weight = 1.0  # what is logged from here on is no batch's
        if whole and progress.phase == EPOCH_END:  # resumed after the end's hooks
            for_loggers = {}
        else:
            newest = results.reduce_step() if trainer.world_size > 1 else results.step_values()
            trainer.published.publish(newest)
            for_loggers = trainer.published.publish(results.reduce_epoch())
            overridden = hooks.on_train_epoch_end is not None
            if overridden:
                hooks.call("on_train_epoch_end")
                for_loggers.update(trainer.published.publish(results.reduce_epoch()))
            if whole:
                progress.phase = EPOCH_END
            results.enter("on_train_epoch_end")
            for monitor in hooks.epoch_end_monitors:
                monitor()
            for_loggers.update(trainer.published.publish(results.reduce_epoch()))
        if whole:
            self.step.step_plateau("epoch", progress.epoch + 1)
        if for_loggers:
            trainer.send_to_loggers(for_loggers, progress.windows - 1)
        if whole or self._done_in_epoch() is None:
            progress.epoch += 1
            progress.batch, progress.phase = 0, EPOCH_START

    # -- stopping ------------------------------------------------------------------------------------------

    def _can_stop_early(self) -> bool:
        config, progress = self.trainer.config, self.progress
        return progress.epoch >= config.min_epochs and progress.global_step >= config.min_steps

    def _done_in_epoch(self) -> str | None:
        trainer, config = self.trainer, self.trainer.config
        if config.max_steps != -1 and self.progress.global_step >= config.max_steps:
            return f"max_steps={config.max_steps} reached"
        interrupted = self._interrupted()
        if interrupted or (self._stop_asked() and self._can_stop_early()):
            trainer.should_stop = True
            if interrupted:
                trainer.interruption = trainer.interruption or "Ctrl-C on another rank"
            return self._reason or self._early_reason()
        return None

    # On several ranks only what they have agreed on counts: this rank's own wish may not be known to the others yet.

    def _stop_asked(self) -> bool:
        trainer = self.trainer
        return trainer.should_stop if trainer.world_size == 1 else trainer.agreement.is_up(trainer.stop_flag)

    def _interrupted(self) -> bool:
        trainer = self.trainer
        if trainer.world_size == 1:
            return trainer.interruption is not None
        return bool(trainer.agreement.is_up(trainer.interrupt_flag))

    def request_stop(self) -> None:
        """Tell the agreement what this rank wants."""
        trainer = self.trainer
        if trainer.should_stop:
            trainer.agreement.request(trainer.stop_flag)
        if trainer.interruption is not None:
            trainer.agreement.request(trainer.interrupt_flag)

    def _agree_on_stopping(self) -> None:
        """Between windows: ask all ranks at once whether one of them wants to stop."""
        trainer = self.trainer
        if trainer.world_size > 1:
            self.request_stop()
            trainer.agreement.now(trainer.stop_flag)
            trainer.agreement.now(trainer.interrupt_flag)

    def _done(self) -> str | None:
        """Why the fit is over; None while it is not."""
        config = self.trainer.config
        assert self.feed is not None
        reason = None
        if self.feed.num_batches == 0:
            reason = "no training batches"
        elif config.max_epochs != -1 and self.progress.epoch >= config.max_epochs:
            reason = f"max_epochs={config.max_epochs} reached"
        else:
            self._agree_on_stopping()
            reason = self._done_in_epoch()
        if reason is not None:
            self._reason = reason
            rank_zero_info(f"trainer.fit ended: {reason}.")
        return reason

    def _early_reason(self) -> str:
        if self.trainer.interruption is not None:
            return "interrupted by Ctrl-C"
        for callback in self.trainer.early_stopping_callbacks:
            message = getattr(callback, "stopping_reason_message", None)
            if message:
                return f"EarlyStopping: {message}"
        return "trainer.should_stop was set"

    def _share_ending(self) -> None:
        """All ranks tell the same of how the fit ended: rank 0's clock may have, or Ctrl-C on one of them."""
        trainer = self.trainer
        if trainer.world_size > 1:
            self._reason = trainer.strategy.broadcast(self._reason)
            if not self._interrupted():
                trainer.interruption = None  # it came when all was over

    def seconds(self) -> float:
        """Time spent in this fit, its earlier lives included."""
        return self.progress.seconds + time.monotonic() - self._started

    # -- validation ----------------------------------------------------------------------------------------

    @property
    def _validates(self) -> bool:
        every = self.trainer.config.check_val_every_n_epoch
        return self.trainer.enable_validation and (every is None or (self.progress.epoch + 1) % every == 0)

    def _validation_due(self, at_window_end: bool) -> bool:
        every, progress = self._validate_every, self.progress
        count = progress.total_batches if self.trainer.config.check_val_every_n_epoch is None else progress.batch
        if progress.last if every == math.inf else count % every == 0:
            return True
        return at_window_end and self._stop_asked() and not self._interrupted() and self._can_stop_early()

    def _validate(self, at_window_end: bool) -> None:
        trainer = self.trainer
        if at_window_end:
            trainer.hooks.own("on_validation_model_zero_grad")
        trainer.state.stage = RunningStage.VALIDATING
        self.validation.evaluate()
        trainer.state.stage = RunningStage.TRAINING
        self._agree_on_stopping()

    def _sanity_check(self) -> None:
        trainer = self.trainer
        steps = trainer.config.num_sanity_val_steps
        if not trainer.enable_validation or steps == 0 or self.resumed is not None:
            return
        with isolate_rng():
            trainer.state.stage = RunningStage.SANITY_CHECKING
            trainer.hooks.call("on_sanity_check_start")
            self.validation.evaluate(sanity_steps=steps)
            trainer.hooks.call("on_sanity_check_end")
            trainer.published.clear()

    # -- what it leaves ------------------------------------------------------------------------------------

    def _log_step(self) -> None:
        trainer = self.trainer
        if trainer.world_size > 1:  # with or without loggers: schedulers and callbacks read these values too
            values = trainer.results.reduce_step()
        else:
            values = trainer.results.take_step_values()
        for_loggers = trainer.published.publish(values)
        if for_loggers:
            trainer.send_to_loggers(for_loggers, self.progress.windows)

    def _restore_randomness(self) -> None:
        if self.resumed is not None:
            state.restore_rank(self.trainer, self.resumed)
            self.resumed = None

    def _result(self) -> Result:
        trainer = self.trainer
        best = trainer.checkpoint_callback
        score = getattr(best, "best_model_score", None)
        return Result(
            stopped="interrupted by Ctrl-C" if trainer.interruption is not None else self._reason or "",
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            best_model_path=str(getattr(best, "best_model_path", "") or ""),
            best_model_score=None if score is None else float(score),
            epochs=self.progress.epoch,
            global_step=self.progress.global_step,
            interrupted=trainer.interruption is not None,
        )

    def release(self) -> None:
        """Let go of loaders and their workers."""
        for loaders in (self.feed, self.validation.feed):
            if loaders is not None:
                loaders.close()


def _validation_interval(config: Any, batches: int | float) -> int | float:
    """Training batches between validations; infinite: at the epoch's end."""
    interval = config.val_check_interval
    if isinstance(interval, int):
        if interval > batches and config.check_val_every_n_epoch is not None and config.limit_val_batches:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}): an epoch has {batches} training batches, so validation "
                "would never run; give a smaller number, or check_val_every_n_epoch=None to count across epochs."
            )
        return interval
    if batches == math.inf:
        if interval != 1.0:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}) is a fraction of an epoch whose length is not known: give "
                "an int (training batches), or 1.0 for the epoch's end."
            )
        return math.inf
    return max(1, int(batches * interval))
