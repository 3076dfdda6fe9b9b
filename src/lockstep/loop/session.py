"""Session: one typed object with all parts of a run. The Trainer owns it, set-up fills it, loops use it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.model_summary import ModelSummary
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
from lockstep.ground.rank import does, log, rank_zero_warn
from lockstep.ground.types import RunningStage, TrainerFn, TrainerState
from lockstep.hooks import ModuleHooks
from lockstep.launch.attempts import trial_folder
from lockstep.loggers.base import Logger
from lockstep.loop.finite_watch import FiniteWatch
from lockstep.loop.hooks import Hooks, is_overridden
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
    """Interface for handling signals in a fit; implemented by `lockstep.loop.signals.Signals`."""

    requested: int
    """Number of the received signal, -1 if a save is due, or 0."""

    def request(self) -> None:
        """Set this rank's flags for a received signal, so that all ranks handle the signal."""

    def act(self) -> None:
        """Handle a received signal, or save if a save was requested. Collective."""

    def epoch_ended(self) -> None:
        """At the end of an epoch, request a save if a save is due."""


@dataclass
class FitState:
    """State of a fit that its checkpoints save.

    Attributes:
        progress: the counters.
        feed: gives this rank its training batches; None before the loaders are requested.
        given: the training loaders as the user passed or returned them.
        requested_for: the epoch for which the loaders were requested, if they are reloaded.
        results: values logged in training.
        weights: the sum of the "weight" that ``training_step`` returned in the current window.
        uneven_targets: True if the samples of the first batch have different numbers of labels.
        resume: further state that a resume needs.
        finite: detects losses, gradients and weights that are not finite.
        started: start time of this attempt of the fit (``time.monotonic``).
    """

    progress: Progress = field(default_factory=Progress)
    feed: Feed | None = None
    given: object = None
    requested_for: int | None = None
    results: LogCollector | None = None
    weights: float | Tensor | None = None
    uneven_targets: bool = False
    resume: Resume = field(default_factory=Resume)
    finite: FiniteWatch = field(default_factory=FiniteWatch)
    started: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return kept(self, "feed", "results")

    def seconds(self) -> float:
        """Seconds spent in this fit, including earlier attempts."""
        return self.progress.seconds + time.monotonic() - self.started

    @property
    def loaded(self) -> Feed:
        """The training feed. Raises AssertionError before the loaders are requested."""
        assert self.feed is not None, "the training loaders have not been requested"
        return self.feed


@dataclass
class RunLoaders:
    """Loaders of one Trainer call, by stage ("train", "val", "test", "predict").

    Attributes:
        given: the loaders that were passed to the call.
        datamodule: the data module of the call, or None.
        module: the LightningModule of the call; None between calls.
    """

    given: dict[str, Any]
    datamodule: LightningDataModule | None
    module: LightningModule | None

    def __getstate__(self) -> dict[str, Any]:
        return kept(self)

    def hook(self, stage: str) -> Callable[[], Any] | None:
        """Return the hook that creates a stage's loaders; None if loaders were passed or no hook is defined."""
        name, hook = f"{stage}_dataloader", None
        # as in Lightning: arguments before the data module, and that before the module
        if self.given.get(stage) is not None:
            return None
        if self.datamodule is not None and is_overridden(name, self.datamodule, LightningDataModule):
            hook = getattr(self.datamodule, name)
        elif is_overridden(name, self.module, ModuleHooks):
            hook = getattr(self.module, name)
        return hook

    def check_reload(self, every: int) -> None:
        """Warn if loaders should be reloaded every few epochs but were passed as objects, which cannot be recreated."""
        given = [f"{stage}_dataloaders" for stage, loaders in self.given.items() if loaders is not None]
        if every and given:
            rank_zero_warn(
                f"Trainer(reload_dataloaders_every_n_epochs={every}): fit() got {' and '.join(given)} as objects, "
                "which cannot be created again. Define the loader hooks in the module or in a data module."
            )

    def defined(self, stage: str) -> bool:
        """Return True if loaders were passed or a hook is defined for this stage."""
        return self.given.get(stage) is not None or self.hook(stage) is not None

    def request(self, stage: str) -> Any:
        """Return a stage's loaders: those passed to the call, or else the hook's. Return None if there are none."""
        hook = self.hook(stage)
        return self.given.get(stage) if hook is None else hook()


@dataclass(repr=False)
class Session:
    """Parts, counters and flags of a run.

    The Trainer's constructor creates it. `lockstep.loop.call` assigns the attributes in the second half in each call;
    they do not exist before the first call.

    Attributes:
        trainer: the Trainer, which is passed to the user's hooks.
        connect: the first step of set-up; determines this process's rank and assigns the module's Trainer.
        cluster: the user's cluster plugin.
        base_callbacks: the Trainer's callbacks; ``callbacks`` also has those of the module. Users may change the list.
        callbacks_at_setup: copy of ``callbacks`` after set-up, to detect changes by users.
        loop_exit: closed when the loop of the call has ended.
        ckpt_path: the checkpoint that the call continues from.
        should_stop: True if this rank requests the end of the fit.
        interruption: "Ctrl-C" or "SIGTERM" if the call ends because of it.
        is_padding: True if the current batch replaces samples that this rank does not have.
        signals: signal handling of the running fit; None in an evaluation and in a trial of the Tuner.
        stop_flag, interrupt_flag, not_finite_flag: bits of ``agreement``.
        base: record of the weights that were frozen at the start.
        activations: memory of activations, measured in the first forward of a fit.
        memory_at_end: memory use by kind at the end of the last fit.
        chooses: True if a plan may replace this strategy when a fit starts.
        inner: session of a Tuner's trial that runs inside this call, so that Ctrl-C reaches it.
        has_returned: True if the last call ran in other processes and its weights were returned to this one.
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
    callbacks_at_setup: list[Callback] = field(init=False)

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
    memory_at_end: MemoryUse | None = None
    chooses: bool = False
    inner: Session | None = None
    has_returned: bool = False
    loop_exit: ExitStack | None = None

    module: LightningModule = field(init=False)
    hooks: Hooks = field(init=False)
    results: LogCollector = field(init=False)
    agreement: ConsensusFlags = field(init=False)
    base: FrozenBase = field(init=False)
    stop_flag: int = field(init=False)
    interrupt_flag: int = field(init=False)
    not_finite_flag: int = field(init=False)

    def __post_init__(self) -> None:
        self.callbacks_at_setup = [*self.callbacks]

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
        """The run's seed. Raises AssertionError before set-up has assigned it."""
        assert self.seed is not None
        return self.seed

    @property
    def fitting(self) -> bool:
        """True if the call is a fit."""
        return self.state.fn is TrainerFn.FITTING

    @property
    def places_first(self) -> bool:
        """True if the module moves to its device before a checkpoint is read."""
        # values of `load_pretrained` are set when the module is placed: later, they would replace the checkpoint's
        return self.strategy.places_first or is_planned(self.module)

    def has(self, name: str) -> bool:
        """Return True if set-up has assigned the attribute ``name``, for example "hooks"."""
        return name in vars(self)

    def begin(self, fn: TrainerFn) -> None:
        """Start a call: reset the attributes that belong to the previous call."""
        self.state.fn, self.interruption = fn, None
        self.state.stage = STAGE_OF[fn]  # as in Lightning, where ``setup`` already knows whether it is for training
        for name in ("hooks", "results", "agreement"):
            vars(self).pop(name, None)

    def branch(self, **changes: object) -> Session:
        """Return a shallow copy of the session in which ``changes`` replace attributes."""
        made = object.__new__(Session)  # `__init__` would make new counters
        vars(made).update(vars(self), **changes)
        return made

    def interrupt(self, by: str | None) -> None:
        """Request that the call, and a trial inside it, end as soon as possible. ``by=None`` cancels the request."""
        self.interruption = by
        self.should_stop = self.should_stop or by is not None
        if self.inner is not None:
            self.inner.interrupt(by)

    def __setstate__(self, kept: dict[str, Any]) -> None:  # in a process that was started, which has no settings yet
        vars(self).update(kept)
        apply_to_process(self.config, self.strategy.root_device.type)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without those that belong to the running call."""
        bound = ("hooks", "results", "agreement", "activations", "signals", "inner", "loop_exit")
        return {name: value for name, value in vars(self).items() if name not in bound}

    # -- callbacks and loggers -----------------------------------------------------------------------------

    def keep_callbacks(self) -> None:
        """Apply the user's changes to ``trainer.callbacks`` since the last call to all later calls."""
        # by identity, since a user's callback may define `__eq__`
        shown, now = [*map(id, self.callbacks_at_setup)], [*map(id, self.callbacks)]
        if shown == now:
            return
        kept = [callback for callback in self.base_callbacks if id(callback) in now or id(callback) not in shown]
        known = {*shown, *map(id, kept)}
        self.base_callbacks = [*kept, *(callback for callback in self.callbacks if id(callback) not in known)]
        check_callbacks("trainer.callbacks", self.base_callbacks)
        self.callbacks, self.callbacks_at_setup = self.base_callbacks, [*self.base_callbacks]

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """Callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def progress_bar(self) -> ProgressBar | None:
        """First progress bar among the callbacks, or None."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar
            (bar.print if bar is not None and bar.is_enabled else print)(*args, **kwargs)

    def report(self, text: str) -> None:
        """Log a line about a fit (its start, memory use, why it ends) on rank 0, at level INFO or DEBUG."""
        if self.is_global_zero:
            bar = self.progress_bar
            summary = any(isinstance(callback, ModelSummary) for callback in self.callbacks)
            # a user who has switched off bar, summary and logger runs a study of many fits
            is_watched = bool(self.loggers) or summary or (bar is not None and bar.is_enabled)
            log.log(logging.INFO if is_watched else logging.DEBUG, text)

    def log_metrics(
        self,
        metrics: dict[str, Tensor],
        step: int | None,
        with_epoch: bool = True,
        also: FiniteWatch | None = None,
    ) -> None:
        """Send values to the loggers.

        Args:
            metrics: values by name; a value named "step" replaces ``step``.
            step: x axis; None: the number of finished windows.
            with_epoch: add the epoch as a value.
            also: watch whose unchecked losses are copied from the device together with the values.
        """
        if not self.loggers:
            return
        others = [] if also is None else also.numbers_to_read()
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
        """Write the logged values to the trial's folder, if the run is a trial of a search. Rank 0 only."""
        folder = trial_folder()
        if folder is None or not self.is_global_zero or not self.published.callback:
            return
        progress = self.fit.progress
        callback = self.published.callback
        metrics = dict(zip(callback, floats(list(callback.values())), strict=True))
        load("services", "trial")(folder).log(metrics, epoch=progress.epoch, step=progress.global_step)

    # -- logged values -------------------------------------------------------------------------------------

    def collect_in(self, results: LogCollector) -> LogCollector:
        """Replace the collector of logged values with ``results``, and return the previous collector."""
        before, self.results = self.results, results
        self.hooks.results = results
        return before

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of each logged name. Values not yet reduced over the ranks are this rank's own."""
        self.show_logged("callback")
        return self.published.callback

    def show_logged(self, to: str) -> None:
        """Publish values that this rank has logged: step values while batches run, epoch values otherwise.

        Args:
            to: the attribute of `LoggedMetrics` to update; the others do not change.
        """
        if self.state.stage is None or not self.has("results"):
            return
        if not self.results.among_batches:
            self.published.preview(self.results.epoch_so_far(), to=(to,))
        elif to != "callback" or self.state.stage is RunningStage.TRAINING:
            values = self.results.step_values(self.results.shown_until, for_bar=to == "progress_bar")
            self.published.publish(values, to=(to,))

    def share_step_values(self) -> None:
        """Publish the last step values, reduced over the ranks, so that decisions based on them agree. Collective."""
        results = self.fit.results
        assert results is not None
        self.published.publish(
            results.agree_on_step() if self.world_size > 1 else results.step_values(results.shown_until)
        )
        results.shown_until = max(results.shown_until, results.micro_batch - 1)  # the current batch may log more

    @property
    def lacks_metrics(self) -> str | None:
        """Reason why metrics that the user logs may be missing in this epoch, or None. The same on all ranks."""
        if self.fit.resume.cut_epoch is not None:
            return "The epoch ended before its last batch"
        if self.fit.resume.lacks_logged:
            return "The run resumed within an epoch, but the checkpoint does not have the values logged in that epoch"
        return None

    # -- stopping ------------------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """True if the ranks have agreed that at least one rank requested a stop."""
        return self.should_stop if self.world_size == 1 else self.agreement.is_up(self.stop_flag)

    @property
    def interrupted(self) -> bool:
        """True if the ranks have agreed that Ctrl-C or a signal ends the fit."""
        if self.world_size == 1:
            return self.interruption is not None
        return self.agreement.is_up(self.interrupt_flag)

    def request_stop(self) -> None:
        """Set this rank's flag for each pending reason to stop: a requested stop, a signal or an interruption."""
        if self.signals is not None and self.signals.requested:
            self.signals.request()
        if self.should_stop:
            self.agreement.request(self.stop_flag)
        if self.interruption is not None:
            self.agreement.request(self.interrupt_flag)

    def agree_on_stop(self) -> None:
        """At the end of a window, determine whether any rank has set ``should_stop``. Collective."""
        # a flag that is up is the same on all ranks, so all skip the message together
        if not self.agreement.is_up(self.stop_flag):
            self.request_stop()
            self.agreement.now(self.stop_flag)

    @does("agreeing on a stop")
    def agree_on_ending(self) -> None:
        """Between windows, determine whether any rank has requested a stop or was interrupted. Collective."""
        if self.world_size > 1:
            self.request_stop()
            self.agreement.now(self.stop_flag)
            self.agreement.now(self.interrupt_flag)
