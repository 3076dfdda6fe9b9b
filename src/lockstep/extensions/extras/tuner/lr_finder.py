"""Learning rate range test: training with a rising rate shows at which rate the loss falls fastest."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.callbacks.base import Callback
from lockstep.extensions.extras.tuner.trial import (
    TrialSnapshot,
    configure_again,
    has_started,
    places_of,
    refuse_without_undo,
    set_everywhere,
    train,
    trial,
    values_of,
)
from lockstep.ground import comm
from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.types import STEP_OUTPUT, LRSchedulerConfig
from lockstep.module import LightningModule
from lockstep.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tqdm import tqdm

MODES = ("linear", "exponential")
NAMES = ("lr", "learning_rate")
"""Default attributes for the learning rate."""
FORGETTING = 0.98
"""Weight of the previous smoothed loss at each step."""


class LRFinder:
    """Result of a learning rate range test.

    Args:
        mode: "exponential" or "linear".
        lr_min: first rate.
        lr_max: last rate.
        num_training: number of rates.

    Attributes:
        results: ``{"lr": [...], "loss": [...]}`` with one entry a step; the loss is smoothed.

    Example::

        finder = Tuner(trainer).lr_find(model, datamodule=data)
        print(finder.suggestion(), finder.results["loss"][:5])
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of one step of the range test.

        Args:
            step: number of the step, from 0 to ``num_training`` - 1.
        """
        if step == 0:
            return self.lr_min
        share = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return self.lr_min * float((self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the smoothed loss falls most steeply.

        Return None, with a warning, if fewer than two finite losses remain.

        Args:
            skip_begin: number of results to skip at the start.
            skip_end: number of results to skip at the end.
        """
        inner = range(len(self.results["loss"]))[skip_begin : -skip_end or None]
        counted = [i for i in inner if math.isfinite(self.results["loss"][i])]
        self._optimal_idx = None
        if len(counted) < 2:
            rank_zero_warn(
                f"lr_find has too few results to suggest a learning rate: {len(self.results['loss'])}, with "
                f"{len(counted)} finite and not skipped (skip_begin={skip_begin}, skip_end={skip_end}). Increase "
                "`num_training`, or skip less."
            )
            return None
        losses = torch.tensor([self.results["loss"][i] for i in counted])
        rates = torch.tensor([self.results["lr"][i] for i in counted])
        (slopes,) = torch.gradient(losses, spacing=[rates])
        self._optimal_idx = counted[int(torch.argmin(slopes))]
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Plot the loss against the learning rate, and return the figure.

        Args:
            suggest: mark the suggested rate with a red point.
            show: open a window.
            ax: axes to draw on; default: a new figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError:
            raise missing_extra("matplotlib", "plot", "lr_find(...).plot()") from None
        figure, ax = pyplot.subplots() if ax is None else (ax.figure, ax)
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None:
            assert self._optimal_idx is not None
            best = self._optimal_idx
            ax.plot(rates[best], losses[best], markersize=10, marker="o", color="red")
        if show:
            pyplot.show()
        return figure


_LRFinder = LRFinder
"""Lightning's name of the class, for annotations."""


class _RangeTestRates(LRScheduler):
    """Scheduler that sets the learning rate of a range test for each step."""

    def __init__(self, optimizer: Optimizer, finder: LRFinder) -> None:
        self._finder = finder
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = finder.lr_min
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self._finder.rate(self.last_epoch)] * len(self.base_lrs)


class _RateRecorder(Callback):
    """Callback that records the learning rate and smoothed loss of each step, and stops a test that diverges."""

    def __init__(self, finder: LRFinder, threshold: float | None, bar: tqdm[Any] | None) -> None:
        self._results = finder.results
        self._threshold = threshold
        self._bar = bar
        self._average = 0.0
        self._best = 0.0
        self._window: list[float] = []
        self._before = 0
        self._rate = 0.0
        self._has_stopped = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._on_any_batch_start(trainer, pl_module, batch_idx)

    def _on_any_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self._before = trainer.global_step
        self._rate = float(trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and outputs:  # training_step did not skip the batch
            self._window.append(float(outputs["loss"]))
        self._on_any_batch_end(trainer, pl_module, batch_idx)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if trainer.global_step == self._before:
            if trainer.strategy.sync_gradients:  # the step was skipped because gradients overflowed
                self._window = []
            return
        self._before = trainer.global_step  # on_train_batch_start is not called for a batch that is None
        window, self._window = self._window, []
        if self._has_stopped:  # ranks agree on the end at a later boundary, and run some more steps
            return
        loss = _mean_loss(trainer, window)
        self._results["lr"].append(self._rate)
        step = len(self._results["lr"])
        if self._bar is not None:
            self._bar.update()
        if math.isnan(loss):
            self._results["loss"].append(math.nan)
            return
        self._average = FORGETTING * self._average + (1 - FORGETTING) * loss
        # Corrects the bias of an average that starts at 0.
        smoothed = self._average / (1 - FORGETTING ** (step + 1))
        if self._threshold is not None and step > 1 and smoothed > self._threshold * self._best:
            self._has_stopped = trainer.should_stop = True
        if smoothed < self._best or step == 1:
            self._best = smoothed
        self._results["loss"].append(smoothed)


def _mean_loss(trainer: Trainer, window: list[float]) -> float:
    """Return the mean loss of an accumulation window over all ranks, or NaN if no rank has a loss. Collective."""
    total, count, ranks = sum(window), float(len(window)), trainer.world_size
    if ranks > 1:
        device = trainer.strategy.root_device
        mine = torch.tensor([total, count], dtype=widest(device), device=device)
        total, count = comm.all_reduce(mine, "sum").tolist()  # ranks without samples take part, too
    return total / ranks / math.ceil(count / ranks) if count else math.nan


@dataclass(frozen=True)
class RangeTest:
    """Settings of a learning rate range test.

    Raises:
        ValueError: a setting is invalid.
    """

    min_lr: float  # first rate
    max_lr: float  # last rate
    num_training: int  # number of rates
    mode: str
    early_stop_threshold: float | None  # in multiples of the best smoothed loss; None never stops
    update_attr: bool
    attr_name: str  # "" for one of NAMES

    def __post_init__(self) -> None:
        low, high = self.min_lr, self.max_lr
        if self.mode not in MODES:
            raise ValueError(f"lr_find(mode={self.mode!r}): pass one of {', '.join(map(repr, MODES))}.")
        if not 0 <= low < high or (low == 0 and self.mode == "exponential"):
            raise ValueError(
                f"lr_find(min_lr={low}, max_lr={high}): use 0 < min_lr < max_lr (mode='linear' may start at 0)."
            )
        if self.num_training < 1:
            raise ValueError(f"lr_find(num_training={self.num_training}): the number of steps must be at least 1.")


def _attribute_name(trainer: Trainer, attr_name: str) -> str:
    kind = type(trainer.lightning_module).__name__
    names = (attr_name,) if attr_name else NAMES
    for name in names:
        if places_of(trainer, name):
            return name
    raise AttributeError(
        f"lr_find(update_attr=True, {attr_name=}): neither {kind} nor the data module has `{'` or `'.join(names)}` "
        "as an attribute or in hparams. Set attr_name to your attribute, or use update_attr=False."
    )


def lr_find(trainer: Trainer, settings: RangeTest, show_progress: bool) -> LRFinder | None:
    """Run a range test inside a fit, after the optimizers are created. Return None in a ``fast_dev_run``.

    With ``update_attr`` the attribute and the optimizer use the suggestion. Before training, ``configure_optimizers``
    is called again; later, all groups of the optimizer get the rate.

    Raises:
        MisconfigurationException: the strategy cannot undo steps, or there are several optimizers or manual
            optimization.
        AttributeError: the attribute does not exist.
    """
    if trainer.fast_dev_run:
        rank_zero_warn("The learning rate finder does nothing in a `fast_dev_run`.")
        return None
    refuse_without_undo(trainer, "The learning rate finder")
    module, optimizers = trainer.lightning_module, trainer.strategy.optimizers
    if not module.automatic_optimization or len(optimizers) != 1:
        raise MisconfigurationException(
            f"The learning rate finder needs one optimizer and automatic optimization. {type(module).__name__} has "
            f"{len(optimizers)} optimizer(s) and automatic_optimization={module.automatic_optimization}."
        )
    name = _attribute_name(trainer, settings.attr_name) if settings.update_attr else ""
    num_training = settings.num_training
    finder = LRFinder(settings.mode, settings.min_lr, settings.max_lr, num_training)
    most = trainer.fit_loop.progress.global_step + num_training
    bar = _bar(num_training) if show_progress and sys.stderr.isatty() else None
    recorder = _RateRecorder(finder, settings.early_stop_threshold, bar)
    flags = {"max_steps": most, "limit_val_batches": limited(trainer.config.limit_val_batches, num_training)}
    try:
        with trial(trainer, TrialSnapshot(trainer), [recorder], **flags):
            rising = LRSchedulerConfig(_RangeTestRates(optimizers[0], finder), interval="step")
            trainer.strategy.lr_scheduler_configs = [rising]
            train(trainer)
    finally:
        if bar is not None:
            bar.close()
    if len(finder.results["lr"]) < num_training:
        rank_zero_info(f"The learning rate finder stopped after {len(finder.results['lr'])} of {num_training} steps.")
    rate = finder.suggestion() if settings.update_attr and trainer.interruption is None else None
    if rate is not None:
        _use_rate(trainer, name, rate)
    return finder


def _use_rate(trainer: Trainer, name: str, rate: float) -> None:
    """Set the attribute ``name``, and the optimizers' learning rates, to the rate that the search has found."""
    set_everywhere(trainer, name, rate)
    rank_zero_info(f"The learning rate finder set `{name}` to {rate} ({', '.join(places_of(trainer, name))}).")
    if not has_started(trainer):
        configure_again(trainer)
        return
    for optimizer in trainer.strategy.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def limited(limit: int | float, batches: int) -> int | float:
    """Return a Trainer's limit of batches, capped at ``batches``. A fraction below 1.0 is not changed."""
    if isinstance(limit, float):
        return batches if limit == 1.0 else limit
    return min(limit, batches)


def _bar(steps: int) -> Any:
    from tqdm import tqdm

    return tqdm(desc="Finding a learning rate", total=steps)


# -- as a callback ------------------------------------------------------------------------------------------


class LearningRateFinder(Callback):
    """Callback that finds a learning rate by a range test when a fit starts; the fit then uses this rate.

    A resumed fit continues with the rate that was found before, without another test.

    Args:
        min_lr: first rate.
        max_lr: last rate.
        num_training_steps: number of rates.
        mode: "exponential" or "linear".
        early_stop_threshold: stop when the smoothed loss exceeds this multiple of the best one; None never stops.
        update_attr: set the module's attribute to the suggestion, and create the optimizer with it.
        attr_name: the attribute; default: `lr` or `learning_rate`.

    Attributes:
        optimal_lr: result of :meth:`lr_find`, with `results`, `suggestion()` and `plot()`.

    Raises:
        ValueError: a setting is invalid.
        AttributeError: when the test starts, ``update_attr`` is True and the attribute does not exist.

    Example::

        class AtMilestones(LearningRateFinder):     # a new rate when layers were unfrozen
            def on_fit_start(self, trainer, pl_module):
                pass

            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch in (0, 5):
                    self.lr_find(trainer, pl_module)
    """

    SUPPORTED_MODES = MODES
    _searches = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self._settings = RangeTest(
            min_lr, max_lr, num_training_steps, mode.lower(), early_stop_threshold, update_attr, attr_name
        )
        self.optimal_lr: LRFinder | None = None
        self._found: float | None = None
        self._is_restored = False

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the range test, and then restore everything except the learning rate.

        Args:
            trainer: the Trainer that runs.
            pl_module: module of the run.

        Raises:
            AttributeError: ``update_attr`` is True, but the attribute does not exist.
            MisconfigurationException: the strategy cannot undo steps, or there are several optimizers or manual
                optimization.
        """
        show = trainer.progress_bar_callback is not None
        self.optimal_lr = lr_find(trainer, self._settings, show_progress=show)
        if self._settings.update_attr and self.optimal_lr is not None:
            name = _attribute_name(trainer, self._settings.attr_name)
            self._found = next(iter(values_of(trainer, name).values()))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_restored, self._is_restored = self._is_restored, False
        if not is_restored:
            self.lr_find(trainer, pl_module)
        elif self._found is not None:
            name = _attribute_name(trainer, self._settings.attr_name)
            set_everywhere(trainer, name, self._found)  # the optimizers got their rate from the checkpoint
            rank_zero_info(f"`{name}` is {self._found}, found earlier in this run, so no range test runs.")

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rate that the range test has found."""
        return {"found": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the learning rate that was found; the next fit uses it without another range test."""
        self._found = None if state_dict["found"] is None else float(state_dict["found"])
        self._is_restored = True
