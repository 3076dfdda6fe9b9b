"""The session: one typed object for all parts of a run. Set-up fills it, loops work on it, the Trainer owns it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.checkpoint.frozen import FrozenBase
from lockstep.checkpoint.pretrained import is_planned
from lockstep.config.devices import apply_to_process
from lockstep.config.objects import check_callbacks
from lockstep.config.run import RunConfig
from lockstep.data.feed import Feed
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.extensions import load
from lockstep.ground.methods import kept
from lockstep.ground.numbers import floats
from lockstep.ground.rank import does
from lockstep.ground.types import RunningStage, TrainerFn, TrainerState
from lockstep.launch.attempts import trial_folder
from lockstep.loggers.base import Logger
from lockstep.loop.finite_watch import FiniteWatch
from lockstep.loop.hooks import Hooks
from lockstep.loop.loaders import RunLoaders
from lockstep.loop.logged_metrics import LoggedMetrics
from lockstep.loop.logging import LogCollector
from lockstep.loop.progress import Progress
from lockstep.loop.resume import Resume
from lockstep.memory.meter import Activations, MemoryUse
from lockstep.module import LightningModule
from lockstep.profilers.base import Profiler

if TYPE_CHECKING:
    from lockstep.trainer import Trainer  # for hooks of the user's alone: nothing in loop/ reads it


STAGE_OF = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


class FitSignals(Protocol):
    """Requests to a fit from outside; implemented by `lockstep.loop.signals.Signals`."""

    asked: int

    def request(self) -> None:
        """Request the flags of this rank's signal."""

    def act(self) -> None:
        """Do what was asked for. Collective."""

    def epoch_ended(self) -> None:
        """Note the end of an epoch."""


@dataclass
class FitState:
    """How far a fit has come, and what it has to go on with: what a checkpoint of it is made from.

    Attributes:
        progress: the counters.
        feed: the training loaders as this rank draws from them; None before they are asked for.
        given: the training loaders as the user made them.
        asked_for: the epoch for which they were asked for, where they are reloaded.
        results: what was logged in training.
        weights: the sum of what ``training_step`` returned as "weight" in the window under way.
        uneven_targets: the samples of the first batch have different numbers of labels.
        resume: what it continues from, and what a checkpoint needs for that.
        finite: looks for losses, gradients and weights that are not finite.
        started: when this attempt of the fit started, on the clock of ``time.monotonic``.
    """

    progress: Progress = field(default_factory=Progress)
    feed: Feed | None = None
    given: object = None
    asked_for: int | None = None
    results: LogCollector | None = None
    weights: float | Tensor | None = None
    uneven_targets: bool = False
    resume: Resume = field(default_factory=Resume)
    finite: FiniteWatch = field(default_factory=FiniteWatch)
    started: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return kept(self, "feed", "results")

    def seconds(self) -> float:
        """Time spent in this fit, its earlier attempts included."""
        return self.progress.seconds + time.monotonic() - self.started

    @property
    def loaded(self) -> Feed:
        """:attr:`feed`, once training has started."""
        assert self.feed is not None, "the training loaders have not been asked for"
        return self.feed


@dataclass(repr=False)
class Session:
    """A run: its parts, its counters, and what steers it.

    The Trainer's constructor makes it. `lockstep.loop.call` fills the second half again in each call; before that,
    those attributes are not there.

    Attributes:
        trainer: the Trainer, to be handed to the user's hooks.
        connect: finds out which rank this process is, and ties the module to the Trainer; the first act of set-up.
        cluster: the user's cluster plugin.
        base_callbacks: the Trainer's own; ``callbacks`` has those of the module besides. Users may change the list.
        shown: ``callbacks`` as set-up made it.
        watched: left when the loop of the call has ended.
        ckpt_path: the checkpoint that the call goes on from.
        should_stop: this rank wants the fit to end.
        interruption: "Ctrl-C" or "SIGTERM", where one has ended the call.
        is_padding: the batch at hand stands in for samples that this rank does not have.
        signals: those of the fit that runs; None in an evaluation and in a trial, which nobody goes on from.
        stop_flag, interrupt_flag, not_finite_flag: bits of ``agreement``.
        base: the weights that were frozen at the start.
        activations: what a forward of this fit keeps, once the first one has been counted.
        used: what memory was used for when the last fit ended.
        chooses: a plan may replace this strategy when a fit starts.
        inner: the session of a trial that runs inside this one's call, so that Ctrl-C reaches it.
        came_back: the last call ran in processes of its own, and its weights have come back to this one.
    """

    trainer: Trainer
    connect: Callable[[], None]
    config: RunConfig
    strategy: Strategy
    profiler: Profiler
    cluster: object
    loggers: list[Logger]
    base_callbacks: list[Callback]
    callbacks: list[Callback]
    shown: list[Callback] = field(init=False)

    state: TrainerState = field(default_factory=TrainerState)
    datamodule: LightningDataModule | None = None
    loaders: RunLoaders = field(default_factory=lambda: RunLoaders({}, None, None))
    enable_validation: bool = False
    seed: int | None = None
    fit: FitState = field(default_factory=FitState)
    published: LoggedMetrics = field(default_factory=LoggedMetrics)
    ckpt_path: str | None = None
    should_stop: bool = False
    received_sigterm: bool = False
    interruption: str | None = None
    is_padding: bool = False
    signals: FitSignals | None = None
    activations: Activations | None = None
    used: MemoryUse | None = None
    chooses: bool = False
    inner: Session | None = None
    came_back: bool = False
    watched: ExitStack | None = None

    module: LightningModule = field(init=False)
    hooks: Hooks = field(init=False)
    results: LogCollector = field(init=False)
    agreement: ConsensusFlags = field(init=False)
    base: FrozenBase = field(init=False)
    stop_flag: int = field(init=False)
    interrupt_flag: int = field(init=False)
    not_finite_flag: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = [*self.callbacks]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.strategy.world.size

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.strategy.world.rank == 0

    @property
    def drawn_seed(self) -> int:
        """:attr:`seed`, where set-up has drawn one."""
        assert self.seed is not None
        return self.seed

    @property
    def fitting(self) -> bool:
        """True if the call is a fit."""
        return self.state.fn is TrainerFn.FITTING

    @property
    def places_first(self) -> bool:
        """True if the module is placed before a checkpoint's weights, which pretrained ones would replace."""
        return self.strategy.places_first or is_planned(self.module)

    def has(self, name: str) -> bool:
        """Return True if set-up has filled an attribute, for example "hooks"."""
        return name in vars(self)

    def begin(self, fn: TrainerFn) -> None:
        """Let go of what belongs to the call before."""
        self.state.fn, self.interruption = fn, None
        self.state.stage = STAGE_OF[fn]  # as in Lightning, where ``setup`` already knows whether it is for training
        for name in ("hooks", "results", "agreement"):
            vars(self).pop(name, None)

    def branch(self, **changes: object) -> Session:
        """Make another session with the parts of this one, some replaced."""
        made = object.__new__(Session)
        vars(made).update(vars(self), **changes)
        return made

    def interrupt(self, by: str | None) -> None:
        """Let the call, and a trial inside it, end at the next boundary; None: it is not to end by itself."""
        self.interruption = by
        self.should_stop = self.should_stop or by is not None
        if self.inner is not None:
            self.inner.interrupt(by)

    def __setstate__(self, kept: dict[str, Any]) -> None:  # in a process that was started, which has no settings yet
        vars(self).update(kept)
        apply_to_process(self.config, self.strategy.root_device.type)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, here or in another process. The rest belongs to this process or the running call."""
        bound = ("hooks", "results", "agreement", "activations", "signals", "inner", "watched")
        return {name: value for name, value in vars(self).items() if name not in bound}

    # -- callbacks and loggers -----------------------------------------------------------------------------

    def keep_callbacks(self) -> None:
        """Before a call: what users have changed in the list of callbacks since set-up made it is the Trainer's own."""
        shown, now = [*map(id, self.shown)], [*map(id, self.callbacks)]
        if shown == now:
            return
        kept = [callback for callback in self.base_callbacks if id(callback) in now or id(callback) not in shown]
        known = {*shown, *map(id, kept)}
        self.base_callbacks = [*kept, *(callback for callback in self.callbacks if id(callback) not in known)]
        check_callbacks("trainer.callbacks", self.base_callbacks)
        self.callbacks, self.shown = self.base_callbacks, [*self.base_callbacks]

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The EarlyStopping callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def print(self, *args: object, **kwargs: Any) -> None:
        """``print`` on rank 0 only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar
            (bar.print if bar is not None and bar.is_enabled else print)(*args, **kwargs)

    def log_metrics(
        self,
        metrics: dict[str, Tensor],
        step: int | None,
        with_epoch: bool = True,
        also: FiniteWatch | None = None,
    ) -> None:
        """Send values to the loggers; a value named "step" replaces ``step``, None means the windows so far.

        What ``also`` has to read of the device is read with them.
        """
        if not self.loggers:
            return
        others = [] if also is None else also.to_read()
        numbers = floats([*metrics.values(), *others])
        scalars = dict(zip(metrics, numbers, strict=False))
        if also is not None and others:
            also.take(numbers[len(metrics) :])
        if "step" in scalars:
            step = int(scalars.pop("step"))
        elif with_epoch:  # an evaluation's single steps have none in Lightning, either
            scalars.setdefault("epoch", self.fit.progress.epoch)
        for logger in self.loggers:
            logger.log_metrics(metrics=scalars, step=self.fit.progress.windows if step is None else step)
            logger.save()

    def record(self) -> None:
        """In a trial of a search, leave what was logged so far in the trial's folder. On rank 0."""
        folder = trial_folder()
        if folder is None or not self.is_global_zero or not self.published.callback:
            return
        progress = self.fit.progress
        callback = self.published.callback
        metrics = dict(zip(callback, floats(list(callback.values())), strict=True))
        load("services", "trial")(folder).log(metrics, epoch=progress.epoch, step=progress.global_step)

    # -- logged values -------------------------------------------------------------------------------------

    def collect_in(self, results: LogCollector) -> LogCollector:
        """Let what is logged from here on go to ``results``; gives where it went before."""
        before, self.results = self.results, results
        self.hooks.results = results
        return before

    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest value of everything that was logged: of all ranks, or of this one until values are reduced."""
        self.show_logged("callback")
        return self.published.callback

    def show_logged(self, to: str) -> None:
        """Show users what has been logged so far, this rank's own: the batch's values, or in an epoch's hooks its.

        Args:
            to: which of the dicts of `LoggedMetrics` is looked at; the others stay as they are.
        """
        if self.state.stage is None or not self.has("results"):
            return
        if not self.results.among_batches:
            self.published.preview(self.results.epoch_so_far(), to=(to,))
        elif to != "callback" or self.state.stage is RunningStage.TRAINING:
            values = self.results.step_values(self.results.shown, for_bar=to == "progress_bar")
            self.published.publish(values, to=(to,))

    def share_step_values(self) -> None:
        """Let ``callback_metrics`` hold the newest values of single steps, reduced over the ranks. Collective."""
        results = self.fit.results
        assert results is not None
        self.published.publish(results.agree_on_step() if self.world_size > 1 else results.step_values(results.shown))
        results.shown = max(results.shown, results.micro_batch - 1)  # in the batch at hand more may be logged

    @property
    def lacks_metrics(self) -> str | None:
        """Why metrics of this epoch may be missing, which then is not the user's mistake. The same on all ranks."""
        if self.fit.resume.cut_epoch is not None:
            return "The epoch ended before its last batch"
        if self.fit.resume.lacks_logged:
            return (
                "The run goes on within an epoch of Lightning's, whose checkpoint does not hold what was logged in it"
            )
        return None

    # -- stopping: on several ranks only what they have agreed on counts ----------------------------------

    @property
    def stop_asked(self) -> bool:
        """True if a rank wants the fit to end and all ranks know."""
        return self.should_stop if self.world_size == 1 else self.agreement.is_up(self.stop_flag)

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C or a signal ends the fit and all ranks know."""
        if self.world_size == 1:
            return self.interruption is not None
        return self.agreement.is_up(self.interrupt_flag)

    def request_stop(self) -> None:
        """Request the flags that this rank wants raised."""
        if self.signals is not None and self.signals.asked:
            self.signals.request()
        if self.should_stop:
            self.agreement.request(self.stop_flag)
        if self.interruption is not None:
            self.agreement.request(self.interrupt_flag)

    def agree_on_stop(self) -> None:
        """At a boundary: ask all ranks at once whether one of them has set ``should_stop``. Collective."""
        if not self.agreement.is_up(self.stop_flag):
            self.request_stop()
            self.agreement.now(self.stop_flag)

    @does("asking who wants to stop")
    def agree_on_ending(self) -> None:
        """Between windows: ask all ranks at once whether one of them wants to stop, or was interrupted. Collective."""
        if self.world_size > 1:
            self.request_stop()
            self.agreement.now(self.stop_flag)
            self.agreement.now(self.interrupt_flag)
