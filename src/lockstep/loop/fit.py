"""The fit: epochs of windows; when to validate, save and stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch

from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.seed import isolate_rng, set_random_states
from lockstep.ground.states import RunningStage, TrainerFn
from lockstep.loop import state
from lockstep.loop.batch_counting import Elastic
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.feed import Feed
from lockstep.loop.forwards import forwards
from lockstep.loop.logging import LogCollector
from lockstep.loop.progress import BATCH_END, EPOCH_END, EPOCH_START, WINDOW_END, Progress
from lockstep.loop.session import session
from lockstep.loop.signals import TERMINATED, Signals
from lockstep.loop.step import Step

# -- when a fit validates ------------------------------------------------------------------------------------


class ValidationTiming:
    """The flags ``val_check_interval`` and ``check_val_every_n_epoch`` of one fit.

    Attributes:
        every: training batches between two validations; infinite: at the epoch's end; None: by time, or not planned.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.every: int | float | None = None
        self._counted: Callable[[int], int] | None = None
        self._seconds = math.inf
        self._since = 0.0
        self._flag = 0

    def start(self) -> None:
        """The fit begins; the ranks can agree on things."""
        interval = self._trainer.config.val_check_interval
        self._seconds = interval.total_seconds() if isinstance(interval, timedelta) else math.inf
        self._since = time.monotonic()
        self._flag = self._trainer.agreement.register("validate")

    def plan(self, batches: int | float, counted: Callable[[int], int] | None = None) -> None:
        """Take in how many training batches an epoch has.

        Args:
            batches: by the count of the run's plan.
            counted: tells that count from this rank's; None: they are the same.

        Raises:
            MisconfigurationException: an interval that does not go with this number.
        """
        self.every = _interval(self._trainer.config, batches)
        self._counted = counted

    def in_epoch(self, epoch: int) -> bool:
        """Whether this epoch is validated at all."""
        every = self._trainer.config.check_val_every_n_epoch
        return self._trainer.enable_validation and (every is None or (epoch + 1) % every == 0)

    def due(self, progress: Progress, at_window_end: bool) -> bool:
        """Whether the interval is over after a training batch."""
        every = self.every
        if every is None:
            return at_window_end and self._time_is_up()
        if every == math.inf:
            return progress.last
        earlier = progress.earlier if self._trainer.config.check_val_every_n_epoch is None else 0
        if self._counted is None:
            return (earlier + progress.batch) % every == 0
        before, after = (earlier + self._counted(number) for number in (progress.batch - 1, progress.batch))
        return before // every < after // every  # a batch of ours may step over the one at which it is due

    def _time_is_up(self) -> bool:
        """Rank 0's clock decides, and all ranks learn of it at the same boundary."""
        trainer, up = self._trainer, time.monotonic() - self._since >= self._seconds
        if trainer.world_size == 1:
            return up
        if up and trainer.is_global_zero:
            trainer.agreement.request(self._flag)
        return bool(trainer.agreement.is_up(self._flag))

    def done(self) -> None:
        """A validation has ended; the clock begins anew."""
        self._since = time.monotonic()
        self._trainer.agreement.lower(self._flag)


def _interval(config: Any, batches: int | float) -> int | float | None:
    interval = config.val_check_interval
    if isinstance(interval, timedelta):
        return None
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
                "an int (training batches), a time, or 1.0 for the epoch's end."
            )
        return math.inf
    return max(1, int(batches * interval))


# -- the loop ------------------------------------------------------------------------------------------------


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


OF_TRAINING = ("training_step", "on_train_batch_end", "on_before_backward")


def _norms_by_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One number for each device, NaN where a tensor on it holds one."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return [torch.stack(torch._foreach_norm(alike)).float().sum() for alike in by_device.values()]


def _flag(name: str) -> Any:
    """One of the Trainer's flags as an attribute of its loop, where Lightning has them."""

    def read(loop: Any) -> Any:
        return getattr(loop.trainer.config, name)

    def write(loop: Any, value: Any) -> None:
        setattr(loop.trainer, name, value)

    return property(read, write, doc=f"The Trainer's ``{name}``; set it to go on by another fit.")


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
        self.results: LogCollector | None = None
        self.logged_elsewhere = False  # by Lightning, in the epoch that a resume goes on with
        self.cut_epoch: dict[str, Any] | None = None  # what an epoch that ended early had logged, for a checkpoint
        self.signals: Signals | None = None  # in a fit; a trial, which nobody goes on from, heeds none
        self.resumed: dict[str, Any] | None = None  # this rank's part of the checkpoint, until training goes on
        self._started = 0.0
        self._reason: str | None = None
        self._stops = False
        self._time_limit: float | None = None
        self._most_steps = math.inf
        self._nan_is_told = False
        self.epochs_by_default = False  # the user gave no `max_epochs`
        self.elastic = Elastic(trainer)
        self.timing = ValidationTiming(trainer)

    max_epochs, min_epochs = _flag("max_epochs"), _flag("min_epochs")
    max_steps, min_steps = _flag("max_steps"), _flag("min_steps")

    # -- the fit -------------------------------------------------------------------------------------------

    def run(self, ckpt_path: Any = None, weights_only: bool | None = None) -> Result:
        """Fit the trainer's module; returns how it ended."""
        trainer = self.trainer
        self.progress, self.feed, self.resumed, self._reason = self.progress.go_on(), None, None, None
        self.cut_epoch, self.logged_elsewhere = None, False
        self.validation.feed = self.elastic.saved = None
        trainer.should_stop = self._nan_is_told = False
        self._time_limit = trainer.config.max_time
        self._most_steps = math.inf if trainer.config.max_steps == -1 else trainer.config.max_steps
        self._started = time.monotonic()
        trainer.signals = self.signals = Signals(trainer)
        with session(trainer, TrainerFn.FITTING, ckpt_path, weights_only), self._anomalies():
            self.results = trainer.results
            if self.signals.ending is not None:
                return self._as_before(self.signals.ending)
            self.timing.start()
            trainer.loaders.check_reload(trainer.config.reload_dataloaders_every_n_epochs)
            self.step.setup()
            self._sanity_check()
            trainer.state.stage = RunningStage.TRAINING
            self.setup_data()
            self.elastic.settle()
            self._say_how_long(ckpt_path)
            if self._done() is None:
                if self._validates:
                    self.validation.setup_data()
                trainer.hooks.call("on_train_start")
                self._restore_randomness()
                while self._done() is None:
                    self.epoch()
                trainer.strategy.end_training()
                trainer.hooks.call("on_train_end")
            else:  # of a fit that had ended, whose ranks may have weights of their own
                trainer.strategy.end_training()
            rank_zero_info(f"trainer.fit ended: {self._reason}.")  # the progress bar is closed by now
            self._share_ending()
            if trainer.interruption is None:
                self.signals.ended(asdict(self._result()))
        self.progress.ended = trainer.interruption is None
        return self._result()

    def _say_how_long(self, ckpt_path: Any) -> None:
        """Say what nobody may have meant: a fit of 1000 epochs, or one that ends before its first step."""
        trainer, progress, config = self.trainer, self.progress, self.trainer.config
        if self.epochs_by_default and (config.max_epochs, config.max_steps, config.max_time) == (1000, -1, None):
            steps = trainer.estimated_stepping_batches
            rank_zero_warn(
                "Trainer(max_epochs) is not set: this fit ends after 1000 epochs"
                + (f", at step {steps}" if math.isfinite(steps) else "")
                + "; set max_epochs, or max_epochs=-1 for no limit."
            )
        reason = self._done() if self.resumed is not None else None
        if reason is not None and trainer.interruption is None:
            rank_zero_warn(
                f"fit(ckpt_path={str(ckpt_path)!r}) goes on from step {progress.global_step}, after {progress.epoch} "
                f"epochs, and there is nothing left to train: {reason}; raise that limit to go on."
            )

    def _look_for_nan(self, values: list[tuple[Any, str, Any]]) -> None:
        """Say once that a loss that was logged is NaN; the fit goes on."""
        if self._nan_is_told:
            return
        for entry, name, value in values:
            if "loss" in name.lower() and entry.key[0] in OF_TRAINING and value.isnan():
                self._tell_nan(f"{name!r} is NaN")
                return

    def _look_for_nan_weights(self) -> None:
        """At an epoch's end, where no loss was logged: NaN gradients have left NaN weights."""
        if self._nan_is_told:
            return
        module = self.trainer.lightning_module
        weights = [p for p in module.parameters() if p.is_floating_point() and p.numel() and p.layout is torch.strided]
        if weights and any(norm.isnan() for norm in _norms_by_device(weights)):
            named = module.named_parameters()
            found = [name for name, p in named if any(p is weight for weight in weights) and p.isnan().any()]
            self._tell_nan(f"parameter {found[0]!r} holds NaN" if found else "a parameter holds NaN")

    def _tell_nan(self, what: str) -> None:
        self._nan_is_told = True
        progress = self.progress
        rank_zero_warn(
            f"{what} at step {progress.global_step} (epoch {progress.epoch}): the loss was NaN there or before. The "
            "fit goes on; Trainer(detect_anomaly=True) names the operation that makes it."
        )

    def _anomalies(self) -> Any:
        detect = self.trainer.config.detect_anomaly
        return torch.autograd.set_detect_anomaly(True) if detect else nullcontext()

    def setup_data(self) -> None:
        """Ask for the training loaders and share them over the ranks; does nothing the second time."""
        if self.feed is None:
            self._load()

    def _reload_due(self, loaded: int | None) -> bool:
        every = self.trainer.config.reload_dataloaders_every_n_epochs
        return bool(self.trainer.loaders.reload_due(loaded, self.progress.epoch, every))

    def val_reload_due(self) -> bool:
        """Whether the validation loaders are to be asked for anew; notes that it is done where it will be.

        A sanity check's loaders count for the epoch that follows only if that epoch is validated, as in Lightning.
        """
        due = self._reload_due(self.progress.val_loaded)
        if due and (not self.trainer.sanity_checking or self._validates):
            self.progress.val_loaded = self.progress.epoch
        return due

    def _load(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        if self.feed is not None:
            self.feed.close()
        if self._reload_due(self.progress.train_loaded):
            self.progress.train_loaded = self.progress.epoch
        self.given = trainer.loaders.request("train")
        self.feed = Feed.train(
            self.given,
            replicas=Replicas.of(trainer.strategy.world),
            seed=trainer.seed,
            limit=config.limit_train_batches,
            distribute=config.use_distributed_sampler,
            order="torch" if config.order == "torch" else "keyed",
            overfit=bool(config.overfit_batches),
            counting=self.elastic.counting,
            planned=self.elastic.planned,
            padded=not trainer.lightning_module.automatic_optimization,
        )
        batches = self.feed.rows
        self.timing.plan(batches, self.feed.rows_at if self.feed.counting.elastic else None)
        self.elastic.prepare(self.feed)
        if trainer.loggers and not config.fast_dev_run and batches < config.log_every_n_steps:
            rank_zero_warn(
                f"An epoch has {batches} training batches, fewer than Trainer(log_every_n_steps="
                f"{config.log_every_n_steps}): give it a lower value to see values of single steps."
            )

    def epoch(self) -> None:
        """One epoch, or what is left of it after a resume."""
        trainer, progress, step = self.trainer, self.progress, self.step
        whole = progress.phase == EPOCH_END
        self.cut_epoch = None
        if progress.phase == EPOCH_START:
            progress.batch = 0
            if self._reload_due(progress.train_loaded):
                self._load()
            trainer.hooks.call("on_train_epoch_start")
        feed = self.feed
        assert feed is not None
        if not whole:
            trainer.strategy.epoch_begins()
            accumulate = trainer.config.accumulation(progress.epoch)
            log_every, validates = trainer.config.log_every_n_steps, self._validates
            feed.begin(progress.epoch, progress.batch, accumulate)
            step.counted = feed.rows_at if feed.counting.elastic else int
            trainer.results.enter("training_step")
            whole = progress.phase != EPOCH_START and self._go_on_after_batch(accumulate)
            self._heed()
            windows = iter(()) if whole or self._done_in_epoch() else feed.windows(accumulate)
            apart = trainer.strategy.steps_apart
            for window in windows:
                if apart:
                    window.share_among(trainer.strategy.averaged_ranks())
                if window.gap is not None:
                    trainer.strategy.check_gap(*window.gap)
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
        self._end_epoch(whole, feed)

    def _go_on_after_batch(self, accumulate: int) -> bool:
        """Do what was still to come after the batch of the checkpoint; tells whether it was the last one."""
        progress, feed = self.progress, self.feed
        assert feed is not None
        progress.last = progress.last or progress.batch >= feed.num_batches
        at_end = progress.last or feed.begun(progress.batch, accumulate) == 0
        if progress.phase == BATCH_END and self._validates and self._validation_due(at_end):
            self._validate(at_end)
        if at_end and progress.phase != WINDOW_END:
            self._after_window()
        return progress.last

    def _after_window(self) -> None:
        """At a boundary: schedulers that watch a metric, and whether the fit stops here."""
        progress, trainer = self.progress, self.trainer
        if self.step.plateau_by_step:
            self.step.step_plateau("step", self.step.counted(progress.batch))
        progress.windows += 1
        progress.phase = WINDOW_END
        stop = trainer.should_stop or progress.global_step >= self._most_steps
        if self.step.shared:
            interrupted = trainer.agreement.is_up(trainer.interrupt_flag)
            stop = stop or trainer.agreement.is_up(trainer.stop_flag)
        else:
            interrupted = self.signals is not None and self.signals.asked != 0
        if interrupted:
            self._heed()
            stop = True
        self._stops = stop and self._done_in_epoch() is not None

    def _heed(self) -> None:
        """Act on a signal that all ranks know of, between windows. Collective where one has interrupted the fit."""
        trainer, signals = self.trainer, self.signals
        if signals is None:
            return
        if trainer.agreement.is_up(trainer.interrupt_flag) if trainer.world_size > 1 else signals.asked:
            signals.act()

    def _look_at_clock(self) -> None:
        assert self._time_limit is not None
        if self.seconds() >= self._time_limit and self.trainer.is_global_zero:
            self.trainer.should_stop = True  # rank 0's clock; the others learn of it at a boundary
            self._reason = f"max_time={self._time_limit:g} s reached"

    def _end_epoch(self, whole: bool, feed: Feed) -> None:
        trainer, progress, hooks, results = self.trainer, self.progress, self.trainer.hooks, self.trainer.results
        results.weight = 1.0  # what is logged from here on is no batch's
        if not whole:  # reducing it begins its means anew, and a resume goes on with them
            self.cut_epoch = state.logged(trainer)
        if whole and progress.phase == EPOCH_END:  # resumed after the end's hooks
            for_loggers = {}
        else:
            newest = results.reduce_step() if trainer.world_size > 1 else results.step_values()
            trainer.published.publish(newest)
            of_epoch = results.reduce_epoch()
            for_loggers = trainer.published.publish(of_epoch)
            self._look_for_nan([*newest, *of_epoch])
            self._look_for_nan_weights()
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
            progress.earlier += feed.rows_at(progress.batch)
            progress.epoch += 1
            progress.batch, progress.phase = 0, EPOCH_START
            self.logged_elsewhere = False
            if self.signals is not None:
                self.signals.epoch_ended()

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

    @property
    def lacks_metrics(self) -> str | None:
        """Why metrics of this epoch may be missing, which then is no mistake of the user's. Of all ranks alike."""
        if self.cut_epoch is not None:
            return "The epoch ended before its last batch"
        if self.logged_elsewhere:
            return (
                "The run goes on within an epoch of Lightning's, whose checkpoint does not hold what was logged in it"
            )
        return None

    @property
    def is_interrupted(self) -> bool:
        """Whether the epoch is cut by Ctrl-C or a signal, so that a resume will end it. Of all ranks alike."""
        return self.cut_epoch is not None and self._interrupted()

    def request_stop(self) -> None:
        """Tell the agreement what this rank wants."""
        trainer = self.trainer
        if self.signals is not None and self.signals.asked:
            self.signals.request()
        if trainer.should_stop:
            trainer.agreement.request(trainer.stop_flag)
        if trainer.interruption is not None:
            trainer.agreement.request(trainer.interrupt_flag)

    def agree_on_stop(self) -> None:
        """At a boundary: ask all ranks at once whether one of them has set ``should_stop``. Collective."""
        trainer = self.trainer
        if not trainer.agreement.is_up(trainer.stop_flag):
            self.request_stop()
            trainer.agreement.now(trainer.stop_flag)

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
            self._heed()
            reason = self._done_in_epoch()
        if reason is not None:
            self._reason = reason
        return reason

    def _early_reason(self) -> str:
        if self.trainer.interruption is not None:
            return self._interruption()
        for callback in self.trainer.callbacks:
            message = getattr(callback, "stopping_reason_message", None)  # EarlyStopping has one, and Timer
            if message:
                return f"{type(callback).__name__}: {message.rstrip('.')}"
        return "trainer.should_stop was set"

    def _interruption(self) -> str:
        return f"interrupted by {TERMINATED if self.trainer.interruption == TERMINATED else 'Ctrl-C'}"

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
        return self.timing.in_epoch(self.progress.epoch)

    def _validation_due(self, at_window_end: bool) -> bool:
        if self.timing.due(self.progress, at_window_end):
            return True
        return at_window_end and self._stop_asked() and not self._interrupted() and self._can_stop_early()

    def _validate(self, at_window_end: bool) -> None:
        trainer = self.trainer
        self.share_step_values()
        if at_window_end:
            trainer.hooks.own("on_validation_model_zero_grad")
        trainer.state.stage = RunningStage.VALIDATING
        self.validation.evaluate()
        trainer.state.stage = RunningStage.TRAINING
        self.timing.done()
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

    def share_step_values(self) -> None:
        """Let ``callback_metrics`` hold the newest values of single steps, reduced over the ranks. Collective."""
        results = self.results
        assert results is not None
        self.trainer.published.publish(
            results.agree_on_step() if self.trainer.world_size > 1 else results.step_values()
        )

    def _log_step(self) -> None:
        trainer = self.trainer
        if trainer.world_size > 1:  # with or without loggers: schedulers and callbacks read these values too
            values = trainer.results.reduce_step()
        else:
            values = trainer.results.take_step_values()
        self._look_for_nan(values)
        for_loggers = trainer.published.publish(values)
        if for_loggers:
            trainer.send_to_loggers(for_loggers, self.progress.windows)

    def _as_before(self, ending: dict[str, Any]) -> Result:
        """This fit has ended in an earlier attempt at the run, and all is as it was then: give its Result."""
        if self.resumed is not None and "random" in self.resumed:
            set_random_states(self.resumed["random"])
        self.resumed, self._reason, self.progress.ended = None, ending["stopped"], True
        return Result(**ending)

    def _restore_randomness(self) -> None:
        if self.resumed is not None:
            state.restore_rank(self.trainer, self.resumed)
            self.resumed = None

    def _result(self) -> Result:
        trainer = self.trainer
        best = trainer.checkpoint_callback
        score = getattr(best, "best_model_score", None)
        return Result(
            stopped=self._interruption() if trainer.interruption is not None else self._reason or "",
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            best_model_path=str(getattr(best, "best_model_path", "") or ""),
            best_model_score=None if score is None else float(score),
            epochs=self.progress.epoch,
            global_step=self.progress.global_step,
            interrupted=trainer.interruption is not None,
        )

    # -- what callbacks ask of it --------------------------------------------------------------------------

    def forwards(self) -> int:
        """One pass over the training batches that trains nothing; see ``loop/forwards.py``."""
        return forwards(self.trainer)

    def save_alone(self, path: str) -> None:
        """Write a checkpoint without asking another rank."""
        state.save_alone(self.trainer, path)

    def release(self) -> None:
        """Let go of loaders and their workers."""
        for loaders in (self.feed, self.validation.feed):
            if loaders is not None:
                loaders.close()
