"""FitLoop, which trains epochs of accumulation windows and decides when to validate, log and stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.data.feed import Feed
from lockstep.data.window import Window
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import load
from lockstep.ground.methods import kept
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.seed import isolate_rng, set_random_states_of
from lockstep.ground.types import RunningStage, TrainerFn
from lockstep.loop import state
from lockstep.loop.call import CallArguments, apply_user_changes, call
from lockstep.loop.closures import ByClosure
from lockstep.loop.ending import FitEnding, Result
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.finite_watch import skipped_updates_text
from lockstep.loop.fit_names import FitNames
from lockstep.loop.memory import watch_first_window
from lockstep.loop.progress import BATCH_END, EPOCH_END, EPOCH_START, WINDOW_END
from lockstep.loop.resume import Resume
from lockstep.loop.session import FitState, Session
from lockstep.loop.signals import Signals
from lockstep.loop.state_checks import taking
from lockstep.loop.step import Ahead, Automatic, Manual, Step
from lockstep.loop.update import Update
from lockstep.loop.validation_timing import ValidationTiming

if TYPE_CHECKING:
    from torch import Tensor


class StepMeasure(Protocol):
    """Interface for measuring the times of training steps; implemented by the extension `balancing`."""

    def attached(self) -> AbstractContextManager[None]:
        """Measure steps inside the ``with`` block."""

    def begin_epoch(self, feed: Feed, epoch: int, accumulate: int) -> None:
        """Prepare for an epoch, or for the rest of an epoch after a resume, before its loaders are opened.

        Args:
            feed: source of the windows.
            epoch: epoch that starts, from 0.
            accumulate: micro-batches per window.
        """

    def window_ended(self, window: Window) -> None:
        """Record the time of a finished window."""


class FitLoop(FitNames):
    """Training loop over epochs. An epoch consists of accumulation windows, and a window consists of micro-batches.

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

    step: Step
    """Runs the windows of the current or last fit; exists once the fit has optimizers (see :attr:`has_step`)."""

    def __init__(self, session: Session, epochs_by_default: bool = False) -> None:
        self.session = session
        self.validation = EvaluationLoop(session, RunningStage.VALIDATING, self._val_reload_due, self._request_loaders)
        self.timing = ValidationTiming(session)
        self.ending = FitEnding(session)
        self.in_train_start = False  # `on_train_start` is running
        self.has_optimizers = False  # of the running fit, and not of an earlier one
        self.is_training = False  # its epochs run
        self.balance: StepMeasure | None = None  # if a callback or the flag `balance` needs the times of steps
        self._stops = False
        self._epochs_by_default = epochs_by_default  # the user gave no `max_epochs`

    @property
    def has_step(self) -> bool:
        """True after the set-up of a fit has created the optimizers and :attr:`step`."""
        return "step" in vars(self)

    @property
    def feed(self) -> Feed | None:
        """The feed, which yields this rank's training batches; None before the loaders are requested."""
        return self.session.fit.feed

    @property
    def current_epoch(self) -> int:
        """The current epoch. In ``on_train_start`` of a fit that resumes at an epoch's end, this is the next epoch."""
        return self.progress.epoch + (self.in_train_start and self.progress.phase == EPOCH_END)

    @property
    def batch_idx(self) -> int:
        """Index, within the epoch, of the training batch that started last; -1 before the first batch."""
        return self.step.newest if self.has_step else -1

    def __getstate__(self) -> dict[str, Any]:
        state = {**kept(self, "balance"), "has_optimizers": False, "is_training": False}
        state.pop("step", None)  # it belongs to the running fit
        return state

    @property
    def given(self) -> object:
        """The training loaders as the user passed or returned them."""
        return self.session.fit.given

    # -- the fit -------------------------------------------------------------------------------------------

    def run(self, ckpt_path: str | None = None, weights_only: bool | None = None) -> Result:
        """Run a whole fit, from set-up to tear-down, and return its result."""
        session = self.session
        signals = self._begin()
        fit = session.fit
        request = CallArguments(TrainerFn.FITTING, ckpt_path, weights_only, self.release, signals)
        try:
            with call(session, request), ExitStack() as measured:
                if session.config.detect_anomaly:  # after set-up: torch switches the mode on when the object is made
                    measured.enter_context(torch.autograd.set_detect_anomaly(True))
                fit.results = session.results
                if signals.ending is not None:
                    # an earlier attempt at the run has ended this fit: the script goes on from there, with the same
                    # random numbers
                    if fit.resume.entry is not None and "random" in fit.resume.entry:
                        set_random_states_of(fit.resume.entry["random"], session.strategy.own_devices)
                    fit.resume.entry, self.ending.reason = None, signals.ending["stopped"]
                    fit.progress.ended = True
                    return Result(**signals.ending)
                self._set_up(ckpt_path, measured)
                if self.ending.between_epochs() is None:
                    if self.validates:
                        # Lightning calls the hook of the validation loaders before `on_train_start`
                        session.state.stage = RunningStage.VALIDATING
                        self.validation.setup_data()
                        session.state.stage = RunningStage.TRAINING
                    self._warn_of_eval_mode()
                    self.in_train_start = True
                    session.hooks.call("on_train_start")
                    apply_user_changes(session)
                    self.in_train_start = False
                    # changes of `on_train_start` do not count, since it runs again in a fit that resumes
                    fit.resume.hook_changes.begin(session.strategy, session.module)
                    if fit.resume.entry is not None:  # last: what hooks have drawn does not change the random states
                        state.restore_rank(session, fit.resume.entry)
                        fit.resume.entry = None
                    self.is_training = True
                    try:
                        while self.ending.between_epochs() is None:
                            self.epoch()
                    finally:
                        self.is_training = False
                        fit.resume.hook_changes.end(session.module)
                    session.strategy.copies.end_training()
                    session.hooks.call("on_train_end")
                else:  # the checkpoint of a fit that had ended; with local steps, weights may differ between ranks
                    session.strategy.copies.end_training()
                # the progress bar is closed by now, so the line does not break it
                session.report(f"trainer.fit ended: {self.ending.reason}{skipped_updates_text(session)}.")
                self.ending.share()
                if session.interruption is None:
                    signals.save_result(asdict(self.ending.result()))
        finally:
            self.balance = None
            fit.finite.stop()
            self._release_step()
        fit.progress.ended = session.interruption is None
        return self.ending.result()

    def _begin(self) -> Signals:
        """Create the state of a new fit, and return the fit's signal handling."""
        session, before = self.session, self.session.fit
        # the counting of batches stays: a second fit of a resumed run cuts batches as the run did
        session.fit = FitState(
            before.progress.for_next_fit(), given=before.given, resume=Resume(batches=before.resume.batches)
        )
        self.validation.feed = before.resume.batches.saved = None
        session.should_stop = session.received_sigterm = self.has_optimizers = self.in_train_start = False
        self.ending.start()
        session.fit.started = time.monotonic()
        return Signals(session)

    def _set_up(self, ckpt_path: str | None, measured: ExitStack) -> None:
        """Prepare the first epoch, after the set-up that all Trainer calls have in common."""
        session, fit, self.has_optimizers = self.session, self.session.fit, True
        self.timing.start()
        fit.finite.start(session, None if fit.resume.entry is None else session.ckpt_path)
        session.loaders.check_reload(session.config.reload_dataloaders_every_n_epochs)
        self.make_step()
        listeners = [callback for callback in session.callbacks if callback._receives_step_times is True]
        if session.config.balance or listeners:
            self.balance = load("services", "balance").measure(session, self.step, self.validation, listeners)
        if session.config.record:
            measured.enter_context(load("services", "recording of steps")(session))
        if self.balance is not None:
            measured.enter_context(self.balance.attached())
        if session.config.log_every_n_steps:  # 0 under `barebones`, which measures nothing
            watch_first_window(session, self.step)
        self._sanity_check()
        session.state.stage = RunningStage.TRAINING
        self.setup_data()
        holds = not session.strategy.steps_itself and not self.step.update.needs_closure
        fit.resume.entry = fit.resume.batches.settle(session.config, fit.loaded, fit.progress, fit.resume.entry, holds)
        session.config = fit.resume.batches.restore_hook_flags(session.config)
        if fit.resume.shares is not None:
            with taking(session.ckpt_path, "its shares"):
                fit.loaded.load_shares(fit.resume.shares, fit.progress.batch, session.config.balance)
        self._check_limits(ckpt_path)

    def make_step(self) -> None:
        """Create :attr:`step`, whose class depends on the kind of optimization, the engine and the optimizer.

        Raises:
            MisconfigurationException: optimizers, precision and engine do not work together.
        """
        session, by_engine = self.session, self.session.strategy.window
        self._release_step()
        update = Update(session)
        if not session.module.automatic_optimization:
            self.step = Manual(session, update)
        elif by_engine is not None:
            self.step = Ahead(session, update, by_engine)
        else:
            self.step = ByClosure(session, update) if update.by_closure else Automatic(session, update)
        update.check_scaler()

    def _release_step(self) -> None:
        """Remove lockstep's hooks from the optimizers of the last fit."""
        if self.has_step:
            self.step.update.watch.detach()

    def _check_limits(self, ckpt_path: str | None) -> None:
        """Warn if ``max_epochs`` is missing, or if a resumed run has already reached its limits.

        Raises:
            MisconfigurationException: the run has finished more epochs than ``max_epochs``.
        """
        session, progress, config = self.session, self.session.fit.progress, self.session.config
        if self._epochs_by_default and (config.max_epochs, config.max_steps, config.max_time) == (1000, -1, None):
            steps = self.estimated_steps()
            rank_zero_warn(
                "`max_epochs` was not set: this fit ends after 1000 epochs"
                + (f", at step {steps}" if math.isfinite(steps) else "")
                + "; set max_epochs, or max_epochs=-1 for no limit."
            )
        if session.fit.resume.entry is not None and -1 != config.max_epochs < progress.epoch:
            raise MisconfigurationException(
                f"trainer.fit(ckpt_path={str(ckpt_path)!r}): this run has finished {progress.epoch} epochs, more than "
                f"Trainer(max_epochs={config.max_epochs}): raise max_epochs to continue."
            )
        reason = self.ending.between_epochs() if session.fit.resume.entry is not None else None
        if reason is not None and session.interruption is None:
            rank_zero_warn(
                f"trainer.fit(ckpt_path={str(ckpt_path)!r}): there is nothing left to train after step "
                f"{progress.global_step} and {progress.epoch} epochs: {reason}; raise that limit to continue."
            )

    def _warn_of_eval_mode(self) -> None:
        """Warn about submodules in eval mode, which a fit does not change. Some libraries return such models."""
        parts = [name or type(part).__name__ for name, part in self.session.module.named_modules() if not part.training]
        if parts:
            others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            rank_zero_warn(
                f"Training starts with {parts[0]!r}{others} in eval mode, where dropout is off and BatchNorm uses its "
                "running statistics: call `.train()` on the modules to train."
            )

    def setup_data(self) -> None:
        """Request the training loaders and distribute their samples over the ranks, unless this is already done.

        With ``reload_dataloaders_every_n_epochs``, a resumed fit replaces loaders that ``configure_optimizers``
        requested for an earlier epoch.
        """
        fit, loaded = self.session.fit, self.session.fit.progress.train_loaded
        every = self.session.config.reload_dataloaders_every_n_epochs
        # a checkpoint may lack the epoch of the loaders
        is_within_other = fit.progress.batch > 0 and self._reload_due(loaded)
        if fit.feed is None or is_within_other or (every and loaded not in (None, fit.requested_for)):
            self._load()

    def estimated_steps(self) -> int | float:
        """Return the number of optimizer steps in the whole fit, for schedulers; inf if it is unknown.

        Requests the training loaders if ``max_epochs`` limits the fit.
        """
        config = self.session.config
        most = math.inf if config.max_steps == -1 else config.max_steps
        if config.max_epochs == -1:
            return most
        self.setup_data()
        batches = self.session.fit.loaded.rows
        if batches == math.inf:
            return most
        if isinstance(config.accumulate_grad_batches, int):
            steps = math.ceil(batches / config.accumulate_grad_batches) * config.max_epochs
        else:
            steps = sum(math.ceil(batches / config.accumulation(epoch)) for epoch in range(config.max_epochs))
        return min(steps, most)

    def _reload_due(self, loaded: int | None) -> bool:
        """Return True if loaders that were last requested in epoch ``loaded`` (None: never) must be requested again."""
        every = self.session.config.reload_dataloaders_every_n_epochs
        return bool(every) and (loaded is None or self.session.fit.progress.epoch - loaded >= every)

    def _val_reload_due(self) -> bool:
        """Return True if the validation loaders must be requested again. In that case, record the current epoch.

        Loaders of a sanity check count for the next epoch only if that epoch is validated, as in Lightning.
        """
        due = self._reload_due(self.session.fit.progress.val_loaded)
        if due and (self.session.state.stage is not RunningStage.SANITY_CHECKING or self.validates):
            self.session.fit.progress.val_loaded = self.session.fit.progress.epoch
        return due

    def _load(self) -> None:
        session, config, fit = self.session, self.session.config, self.session.fit
        if fit.feed is not None:
            fit.feed.close()  # before the new loaders start workers of their own
        if self._reload_due(fit.progress.train_loaded):
            fit.progress.train_loaded = fit.progress.epoch
        fit.requested_for, fit.given = fit.progress.train_loaded, self._request_loaders("train")
        automatic = session.module.automatic_optimization
        feed = fit.feed = Feed.train(
            fit.given,
            replicas=session.strategy.replicas.for_feed(session.strategy.members),
            seed=session.drawn_seed,
            limit=config.limit_train_batches,
            distribute=config.use_distributed_sampler,
            order="torch" if config.order == "torch" else "keyed",
            overfit=bool(config.overfit_batches),
            counting=partial(fit.resume.batches.counting, config, automatic),
            planned=fit.resume.batches.planned,
            padded=not automatic or session.strategy.runs_padding,
            shares=session.strategy.shares,
            reshared=session.world_size > 1 and (config.balance or fit.resume.shares is not None),
        )
        batches = feed.rows
        fit.resume.counted = feed.rows_at if feed.counting.is_replanned else int
        self.timing.plan(batches)
        fit.resume.batches.prepare(feed, config, fit.progress.epoch)
        if session.loggers and not config.fast_dev_run and batches < config.log_every_n_steps:
            rank_zero_warn(
                f"The number of training batches ({batches}) is smaller than the logging interval "
                f"Trainer(log_every_n_steps={config.log_every_n_steps}): set a lower log_every_n_steps to log values "
                "of single steps."
            )

    def _request_loaders(self, stage: str) -> Any:
        """Request a stage's loaders. In the dataloader hook, ``current_epoch`` is the first epoch that uses them."""
        progress, every = self.session.fit.progress, self.session.config.reload_dataloaders_every_n_epochs
        epoch, of = progress.epoch, progress.train_loaded if stage == "train" else progress.val_loaded
        progress.epoch = epoch if of is None or not every else of
        try:
            return self.session.loaders.request(stage)
        finally:
            progress.epoch = epoch

    def _begin_epoch(self) -> None:
        """Start or resume an epoch. When it starts, reload data if due, and call ``on_train_epoch_start``."""
        progress = self.session.fit.progress
        if progress.phase == EPOCH_START:
            progress.batch = 0
            if self._reload_due(progress.train_loaded):
                self._load()
            apply_user_changes(self.session)
            self.session.hooks.call("on_train_epoch_start")
        # hooks may have replaced callbacks, hooks, `training_step` and schedulers; steps only read what is noted here
        apply_user_changes(self.session)
        self.step.take_step()
        self.step.update.schedulers.use(self.session.strategy.lr_scheduler_configs)

    def _windows_left(self, feed: Feed) -> tuple[bool, Iterator[Window]]:
        """Return (True if only the epoch's end hooks are left to run, iterator over the remaining windows)."""
        session, progress = self.session, self.session.fit.progress
        session.strategy.check_trained()
        accumulate = session.config.accumulation(progress.epoch)
        if self.balance is not None:
            self.balance.begin_epoch(feed, progress.epoch, accumulate)
        feed.begin(progress.epoch, progress.batch, accumulate)
        self.ending.start_epoch()
        session.results.enter("training_step")  # so that a step only sets the table
        whole = progress.phase != EPOCH_START and self._continue_after_batch(accumulate)
        self.ending.act_on_signals()
        windows = iter(()) if whole or self.ending.in_epoch() else feed.windows(accumulate)
        session.fit.resume.window_start.begin_epoch(session.module, session.results, session.published.callback)
        return whole, windows

    def _after_update(self, log_every: int | None) -> None:
        """Check ``max_time`` after a window's update, and send step values to the loggers if due."""
        session = self.session
        if session.config.max_time is not None:
            self.ending.check_clock(session.config.max_time)
        if not log_every:
            return
        # the step at which a fit stops is always logged; all ranks have agreed on the flag, so all of them reduce
        stops = session.stop_flag in session.agreement.up if self.step.shared else session.should_stop
        if stops or (session.fit.progress.windows + 1) % log_every == 0:
            if session.world_size > 1:  # with or without loggers: schedulers and callbacks read these values too
                values = session.results.reduce_step()
            else:
                values = session.results.take_step_values()
            for_loggers = session.published.publish(values)
            if for_loggers:
                # losses that wait on the device are read by the same copy
                session.log_metrics(for_loggers, session.fit.progress.windows, also=session.fit.finite)

    def epoch(self) -> None:
        """Train one epoch, or its remaining part after a resume."""
        session, progress, step = self.session, self.session.fit.progress, self.step
        whole = progress.phase == EPOCH_END
        session.fit.resume.cut_epoch = None
        self._begin_epoch()
        feed = session.fit.loaded
        if not whole:
            # read once an epoch: a steady step looks at no flag that only hooks between epochs may change
            log_every, validates = session.config.log_every_n_steps, self.validates
            whole, windows = self._windows_left(feed)
            balance = self.balance
            for window in windows:
                remaining = window.size
                for _ in step.window(window, progress.batch):
                    remaining -= 1
                    if not remaining:
                        self._after_update(log_every)
                    if validates and self._validation_due(not remaining):
                        self._validate(not remaining)
                if step.ended_by_user:
                    # as in Lightning, the epoch counts as whole, so its schedulers are stepped
                    step.ended_by_user, whole = False, True
                    step.update.schedulers.after_epoch()
                    break
                self._after_window()
                if balance is not None:
                    balance.window_ended(window)
                whole = progress.last
                if self._stops:
                    break
            self.ending.had_no_batches = not whole and not progress.batch
        self._end_epoch(whole, feed)

    def _continue_after_batch(self, accumulate: int) -> bool:
        """After a resume, validate and end the window if still due. Return True if the epoch has no more batches."""
        progress, feed = self.session.fit.progress, self.session.fit.loaded
        progress.last = progress.last or progress.batch >= feed.num_batches
        at_end = progress.last or feed.batches_done(progress.batch, accumulate) == 0
        self.step.continue_after(progress.batch, accumulate)
        if progress.phase == BATCH_END and self.validates and self._validation_due(at_end):
            self._validate(at_end)
        if at_end and progress.phase != WINDOW_END:
            self._after_window()
        return progress.last

    def _after_window(self) -> None:
        """Step schedulers that monitor a metric, count the window, and decide whether the fit stops."""
        session = self.session
        progress = session.fit.progress
        # after a validation of this window, which may have logged the metric
        if self.step.update.schedulers.by_metric["step"]:
            self.step.update.schedulers.watch_metric("step", session.fit.resume.counted(progress.batch))
        progress.windows += 1
        progress.phase = WINDOW_END
        signals = session.signals
        is_requested = session.should_stop or (signals is not None and signals.requested != 0)
        is_last = progress.global_step >= self.ending.most_steps
        # four reads in a steady step: `after_window` is called only if one of them has something
        has_request = is_requested or is_last or session.fit.finite.has_found or session.agreement.up
        self._stops = bool(has_request) and self.ending.after_window()

    def _call_end_hooks(self, whole: bool) -> dict[str, Tensor]:
        """Reduce the epoch's logged values and call its end hooks; return the values for the loggers."""
        session, hooks, results = self.session, self.session.hooks, self.session.results
        newest = results.reduce_step() if session.world_size > 1 else results.step_values(results.shown_until)
        session.published.publish(newest)
        results.shown_until = results.micro_batch
        for_loggers = self._publish_epoch()
        session.fit.finite.agree()
        if whole:
            self.step.update.watch.epoch_ended()
        # a third party's callback may exist on one rank only, and reducing what it logs is collective
        if hooks.on_train_epoch_end is not None or session.world_size > 1:
            hooks.call("on_train_epoch_end")
            for_loggers.update(self._publish_epoch())
        results.reset_metrics()
        if whole:  # before the callbacks that save: their checkpoints continue with the next epoch
            session.fit.progress.phase = EPOCH_END
        results.enter("on_train_epoch_end")
        # EarlyStopping and ModelCheckpoint read what the module has logged in its own hook
        for monitor in hooks.epoch_end_monitors:
            monitor()
        for_loggers.update(self._publish_epoch())
        return for_loggers

    def _publish_epoch(self) -> dict[str, Tensor]:
        """Reduce the epoch's logged values and publish them as metrics; return the loggers' metrics. Collective."""
        session = self.session
        values = session.results.reduce_epoch()
        for_loggers = session.published.publish(values)
        session.published.note_measured(values, session.fit.progress.global_step)
        return for_loggers

    def _end_epoch(self, whole: bool, feed: Feed) -> None:
        session, results, progress = self.session, self.session.results, self.session.fit.progress
        results.weight, results.among_batches = 1.0, False  # values from here on do not belong to a batch
        if not whole:  # the reductions below clear the running means, with which a resume continues
            session.fit.resume.cut_epoch = state.logged(session)
        resumed_at_end = whole and progress.phase == EPOCH_END  # the run that saved has called the hooks of the end
        for_loggers = {} if resumed_at_end else self._call_end_hooks(whole)
        if whole:
            self.step.update.schedulers.watch_metric("epoch", progress.epoch + 1)
        if for_loggers:
            session.log_metrics(for_loggers, progress.windows - 1)
        session.record()
        # an epoch that a limit or Ctrl-C has cut keeps its counters, so that a resume continues within it
        if whole or self.ending.in_epoch() is None:
            progress.earlier += feed.rows_at(progress.batch)
            progress.epoch += 1
            progress.batch, progress.validated, progress.phase = 0, 0, EPOCH_START
            session.fit.resume.lacks_logged = False
            if session.signals is not None:
                session.signals.epoch_ended()

    # -- stopping ------------------------------------------------------------------------------------------

    @property
    def expects_validation(self) -> bool:
        """True if the fit has validation batches, or may have some because its loaders are not yet requested."""
        feed = self.validation.feed
        return self.session.enable_validation and (feed is None or sum(feed.by_loader) > 0)

    @property
    def lacks_metrics(self) -> str | None:
        """Reason why metrics of this epoch may be missing, or None; see `Session.lacks_metrics`."""
        return self.session.lacks_metrics

    @property
    def is_interrupted(self) -> bool:
        """True if Ctrl-C or a signal ends the fit within an epoch, identically on all ranks."""
        return self.session.fit.resume.cut_epoch is not None and self.session.interrupted

    # -- validation ----------------------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        return self.timing.in_epoch(self.session.fit.progress.epoch)

    def validation_follows(self) -> bool:
        """Return True if a validation is due after the current training batch, the last one in its window."""
        return self.validates and self._validation_due(True)

    def _validation_due(self, at_window_end: bool) -> bool:
        session, at_once = self.session, self.step.at_once
        if at_once > 1 and not at_window_end:
            return False  # the window was played in one piece
        if self.timing.due(session.fit.progress, at_window_end, at_once):
            return True
        return at_window_end and session.stop_requested and not session.interrupted and self.ending.may_stop_early()

    def _validate(self, at_window_end: bool) -> None:
        session = self.session
        session.fit.finite.agree()  # before: a validation of weights that are NaN would only cost time
        session.share_step_values()
        session.results.shown_until = session.results.micro_batch
        if at_window_end:
            session.hooks.own("on_validation_model_zero_grad")
        session.state.stage = RunningStage.VALIDATING
        self.validation.evaluate()
        session.state.stage = RunningStage.TRAINING
        self.timing.done()
        # callbacks may have stopped the fit, on some ranks only
        self.session.agree_on_ending()

    def _sanity_check(self) -> None:
        session = self.session
        steps = session.config.num_sanity_val_steps
        if not session.enable_validation or steps == 0 or session.fit.resume.entry is not None:
            return
        with isolate_rng():  # training draws the same numbers with and without a sanity check
            session.state.stage = RunningStage.SANITY_CHECKING
            session.hooks.call("on_sanity_check_start")
            self.validation.evaluate(sanity_steps=steps)
            session.hooks.call("on_sanity_check_end")
            session.published.clear()

    # -- for callbacks -------------------------------------------------------------------------------------

    def save_alone(self, path: str) -> None:
        """Write a checkpoint from this rank alone, without communication."""
        state.save_alone(self.session, path)

    def release(self) -> None:
        """Close the loaders and their workers."""
        for loaders in (self.feed, self.validation.feed):
            if loaders is not None:
                loaders.close()
