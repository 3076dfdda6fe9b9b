"""Where metrics and hyperparameters go. A face: it only re-exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.aliases import late

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
_REFUSED = {
    "CometLogger": "what it does can only be seen on Comet's servers, so that no test could hold it to its word",
    "LitLogger": "it is the client of one company's service, which takes an account there",
    "NeptuneLogger": "Neptune has closed its service, and Lightning 2.6 refuses it as well",
}
_WAY_OUT = (
    "Log to TensorBoardLogger, CSVLogger, WandbLogger or MLFlowLogger, or write one of your own: derive from "
    "lockstep.loggers.Logger and pass it as Trainer(logger=...)"
)

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """Import a logger's file when its name is first used.

    Raises:
        ImportError: for a logger of Lightning's that is not here; it says why, and what to do.
    """
    if name in _REFUSED:
        raise ImportError(f"lockstep has no {name}: {_REFUSED[name]}. {_WAY_OUT}.", name=f"{__name__}.{name}")
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
