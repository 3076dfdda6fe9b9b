"""Callbacks: code that runs at points of a run, kept apart from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.ground.lazy_imports import late

if TYPE_CHECKING:
    from lockstep.callbacks.base import Callback
    from lockstep.callbacks.device_stats_monitor import DeviceStatsMonitor
    from lockstep.callbacks.early_stopping import EarlyStopping
    from lockstep.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from lockstep.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from lockstep.callbacks.lambda_function import LambdaCallback
    from lockstep.callbacks.lr_monitor import LearningRateMonitor
    from lockstep.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
    from lockstep.callbacks.model_summary import ModelSummary, RichModelSummary
    from lockstep.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from lockstep.callbacks.prediction_writer import BasePredictionWriter
    from lockstep.callbacks.progress.base import ProgressBar
    from lockstep.callbacks.progress.plain import PlainProgressBar
    from lockstep.callbacks.progress.rich import RichProgressBar, RichProgressBarTheme
    from lockstep.callbacks.progress.tqdm import TQDMProgressBar
    from lockstep.callbacks.pruning import ModelPruning
    from lockstep.callbacks.spike import SpikeDetection, TrainingSpikeException
    from lockstep.callbacks.stochastic_weight_avg import StochasticWeightAveraging
    from lockstep.callbacks.throughput_monitor import ThroughputMonitor
    from lockstep.callbacks.timer import Timer
    from lockstep.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
    from lockstep.tuner.batch_size import BatchSizeFinder
    from lockstep.tuner.lr_finder import LearningRateFinder

_FILES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": ".tuner.batch_size",  # of the floor above: a face may re-export from any
    "Callback": "base",
    "Checkpoint": "model_checkpoint",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "LambdaCallback": "lambda_function",
    "LearningRateFinder": ".tuner.lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PlainProgressBar": "progress.plain",
    "ProgressBar": "progress.base",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "progress.rich",
    "RichProgressBarTheme": "progress.rich",
    "SpikeDetection": "spike",
    "StochasticWeightAveraging": "stochastic_weight_avg",
    "TQDMProgressBar": "progress.tqdm",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "TrainingSpikeException": "spike",
    "WeightAveraging": "weight_averaging",
}

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PlainProgressBar",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "TrainingSpikeException",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    """Import a callback's file when its name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
