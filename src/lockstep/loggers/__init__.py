"""Loggers: destinations of metrics and hyperparameters. This file only re-exports their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.loggers.base import DummyLogger as DummyLogger
    from lockstep.loggers.base import Logger as Logger
    from lockstep.loggers.csv import CSVLogger as CSVLogger
    from lockstep.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from lockstep.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from lockstep.loggers.wandb import WandbLogger as WandbLogger

_FILES = {
    "CSVLogger": "csv",
    "DummyLogger": "base",
    "Logger": "base",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
