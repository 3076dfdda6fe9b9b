"""Type aliases with public names for the arguments and results of hooks, and the states of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import NotRequired, Required

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
"""Result of ``training_step``: the loss, a mapping with ``"loss"``, or None to skip the batch."""

EVALUATE_OUTPUT = list[Mapping[str, float]]
"""Result of ``validate`` and ``test``: the metrics of each loader."""

PREDICT_OUTPUT = list[Any] | list[list[Any]]
"""Result of ``predict``: the results of each batch, in a list for each loader if there are several."""

TRAIN_DATALOADERS = Any
"""An iterable of batches, or a dict, list or CombinedLoader of iterables."""

EVAL_DATALOADERS = Any
"""An iterable of batches, or several."""

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


@dataclass
class LRSchedulerConfig:
    """A learning rate scheduler, and the settings that determine when it is stepped."""

    scheduler: LRSchedulerTypeUnion
    name: str | None = None  #: name in LearningRateMonitor's logs; None: derived from the optimizer
    interval: str = "epoch"  #: "epoch" or "step"
    frequency: int = 1  #: step once in so many intervals
    reduce_on_plateau: bool = False  #: step with the value of `monitor`
    monitor: str | None = None  #: name of a logged metric
    strict: bool = True  #: raise an error, not a warning, if the monitor was never logged


class LRSchedulerConfigType(TypedDict, total=False):
    """The dict form of `LRSchedulerConfig`, which ``configure_optimizers`` may return."""

    scheduler: Required[LRSchedulerTypeUnion]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """A dict with an optimizer, which ``configure_optimizers`` may return."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """A dict with an optimizer and its scheduler, which ``configure_optimizers`` may return."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfig]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | dict[str, Any]
    | None
)
"""Result of ``configure_optimizers``; a dict annotated with this type has the keys of the configs above."""

if TYPE_CHECKING:

    class OneOptimizerOrSeveral(Optimizer, list[Optimizer]):
        """Type of the result of ``self.optimizers()``, which is an optimizer or a list of optimizers."""

else:
    OneOptimizerOrSeveral = Optimizer | list[Optimizer]


class LogOptions(TypedDict, total=False):
    """Keyword arguments of ``self.log`` that ``self.log_dict`` also accepts."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: object
    add_dataloader_idx: bool
    batch_size: int | None
    metric_attribute: str | None
    rank_zero_only: bool


# -- what a Trainer is doing ----------------------------------------------------------------------------------


class _Word(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class TrainerStatus(_Word):
    """Status of a Trainer call, such as running or finished."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """True if the call has finished or was interrupted."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Word):
    """The method of the Trainer that the user has called, such as ``fit``."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Word):
    """The loop that is running. Inside ``fit``, this is training, validation or the sanity check."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True in validation, in a test and in the sanity check."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The prefix for this stage in ``<prefix>_dataloader`` and ``limit_<prefix>_batches``."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """The method, stage and status of a Trainer's call. Callbacks read them from ``trainer.state``.

    Attributes:
        status: state of the call: it is initializing, running, finished or interrupted.
        fn: method of the last call, such as "fit"; None before the first call.
        stage: current stage, such as "train" or "validate" within a fit; None outside of calls.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """True if the call has finished normally."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the call has finished or was interrupted."""
        return self.status.stopped


class Planned(Protocol):
    """Result of `Trainer.plan`, with the estimated memory and time of each configuration. Print it for a report."""

    @property
    def rows(self) -> Sequence[Any]:
        """All configurations, each with its estimated memory and time."""

    @property
    def choice(self) -> Any:
        """The best configuration; None if none fits into memory."""

    @property
    def reason(self) -> str:
        """The reason for the choice, as text."""

    def lines(self, everything: bool = False) -> Iterator[str]:
        """Yield the lines of the report. With ``everything``, include configurations that are not worth choosing."""

    def save(self, path: str | Path) -> None:
        """Write the choice to a YAML file, for use as ``Trainer(strategy="plan.yaml")``.

        Args:
            path: path of the file.

        Raises:
            MisconfigurationException: nothing fits into memory, so there is no choice.
        """


class Verified(Protocol):
    """Result of `Trainer.verify`; truthy if the ranks train the same model as one process. Print it for a report."""

    @property
    def verdict(self) -> str:
        """The verdict: "alike", "different" or "could not tell"."""

    @property
    def first_difference(self) -> str:
        """Description of the first difference; "" if there is none."""

    @property
    def cause(self) -> str:
        """Cause of the difference, with the line of the script; "" if it was not found."""

    @property
    def exit_code(self) -> int:
        """Exit code of ``lockstep verify``: 0 if the runs agree, 1 if they differ, 2 if that is unknown."""

    def __bool__(self) -> bool: ...
