"""Where metrics and hyperparameters go. A face: it only re-exports."""

from lockstep.loggers.base import DummyLogger, Logger
from lockstep.loggers.csv import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DummyLogger", "Logger", "TensorBoardLogger"]
