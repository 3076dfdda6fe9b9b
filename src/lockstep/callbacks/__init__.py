"""Callbacks: code, separate from the model, that the Trainer calls at fixed points of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late, listed

if TYPE_CHECKING:
    from lockstep.callbacks.base import Callback as Callback
    from lockstep.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from lockstep.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from lockstep.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from lockstep.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from lockstep.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from lockstep.callbacks.lambda_function import LambdaCallback as LambdaCallback
    from lockstep.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from lockstep.callbacks.model_checkpoint import Checkpoint as Checkpoint
    from lockstep.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from lockstep.callbacks.model_summary import ModelSummary as ModelSummary
    from lockstep.callbacks.model_summary import RichModelSummary as RichModelSummary
    from lockstep.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from lockstep.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from lockstep.callbacks.progress.base import PlainProgressBar as PlainProgressBar
    from lockstep.callbacks.progress.base import ProgressBar as ProgressBar
    from lockstep.callbacks.progress.rich import (
        RichProgressBar as RichProgressBar,
    )
    from lockstep.callbacks.progress.rich import (
        RichProgressBarTheme as RichProgressBarTheme,
    )
    from lockstep.callbacks.progress.tqdm import TQDMProgressBar as TQDMProgressBar
    from lockstep.callbacks.timer import Timer as Timer
    from lockstep.extensions.balancing.stage_timeline import StageTimeline as StageTimeline
    from lockstep.extensions.balancing.straggler_monitor import StragglerMonitor as StragglerMonitor
    from lockstep.extensions.extras.pruning import ModelPruning as ModelPruning
    from lockstep.extensions.extras.spike import (
        SpikeDetection as SpikeDetection,
    )
    from lockstep.extensions.extras.spike import (
        TrainingSpikeException as TrainingSpikeException,
    )
    from lockstep.extensions.extras.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
    from lockstep.extensions.extras.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from lockstep.extensions.extras.tuner.batch_size import BatchSizeFinder as BatchSizeFinder
    from lockstep.extensions.extras.tuner.lr_finder import LearningRateFinder as LearningRateFinder
    from lockstep.extensions.extras.weight_averaging import (
        EMAWeightAveraging as EMAWeightAveraging,
    )
    from lockstep.extensions.extras.weight_averaging import (
        WeightAveraging as WeightAveraging,
    )
    from lockstep.extensions.search.prune_trial import PruneTrial as PruneTrial

_FILES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "Callback": "base",
    "Checkpoint": "model_checkpoint",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "LambdaCallback": "lambda_function",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PlainProgressBar": "progress.base",
    "ProgressBar": "progress.base",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "progress.rich",
    "RichProgressBarTheme": "progress.rich",
    "TQDMProgressBar": "progress.tqdm",
    "Timer": "timer",
}

__all__ = listed(__name__, _FILES)


def __getattr__(name: str) -> Any:
    """Import a callback's file when its name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
