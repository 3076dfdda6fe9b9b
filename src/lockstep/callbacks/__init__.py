"""Callbacks: code that runs at points of a run, kept apart from the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.callbacks.base import Callback
    from lockstep.callbacks.early_stopping import EarlyStopping
    from lockstep.callbacks.lambda_function import LambdaCallback
    from lockstep.callbacks.lr_monitor import LearningRateMonitor
    from lockstep.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
    from lockstep.callbacks.model_summary import ModelSummary
    from lockstep.callbacks.progress.base import ProgressBar
    from lockstep.callbacks.progress.plain import PlainProgressBar
    from lockstep.callbacks.progress.rich import RichProgressBar
    from lockstep.callbacks.progress.theme import RichProgressBarTheme
    from lockstep.callbacks.progress.tqdm import TQDMProgressBar
    from lockstep.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

_FILES = {
    "Callback": "base",
    "Checkpoint": "model_checkpoint",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "LambdaCallback": "lambda_function",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "PlainProgressBar": "progress.plain",
    "ProgressBar": "progress.base",
    "RichProgressBar": "progress.rich",
    "RichProgressBarTheme": "progress.theme",
    "TQDMProgressBar": "progress.tqdm",
    "WeightAveraging": "weight_averaging",
}

__all__ = [
    "Callback",
    "Checkpoint",
    "EMAWeightAveraging",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "PlainProgressBar",
    "ProgressBar",
    "RichProgressBar",
    "RichProgressBarTheme",
    "TQDMProgressBar",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    """Import a callback's file when its name is first used."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
