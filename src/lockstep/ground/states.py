"""What a Trainer is doing: function, stage, status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class _Word(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class TrainerStatus(_Word):
    """How far a call of the Trainer has come."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the call is over, by its end or by an interruption."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Word):
    """The method that the user called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Word):
    """The loop that runs now; inside ``fit`` that is training, validation or the sanity check."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether this stage measures the model on held-out data."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The name that this stage has in ``<prefix>_dataloader`` and ``limit_<prefix>_batches``."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """Function, stage and status of a Trainer, as callbacks read them from ``trainer.state``."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the call ended by itself."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the call is over."""
        return self.status.stopped
