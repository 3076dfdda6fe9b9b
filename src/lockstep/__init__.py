"""lockstep: one LightningModule, trained unchanged on one process or on many."""

import gc
from typing import TYPE_CHECKING, Any

from lockstep.ground.foreign import warn_if_installed
from lockstep.launch.environment import ask_nvml, inherit
from lockstep.names.finder import install, late, listed

if TYPE_CHECKING:
    from lockstep import callbacks as callbacks
    from lockstep import loggers as loggers
    from lockstep import profilers as profilers
    from lockstep import strategies as strategies
    from lockstep import utilities as utilities
    from lockstep.callbacks.base import Callback as Callback
    from lockstep.checkpoint.pretrained import load_pretrained as load_pretrained
    from lockstep.datamodule import LightningDataModule as LightningDataModule
    from lockstep.engines.owners import parameter_wise as parameter_wise
    from lockstep.extensions.parallel.container import DistributedDataParallel as DistributedDataParallel
    from lockstep.extensions.parallel.dp.replicas import DataParallel as DataParallel
    from lockstep.extensions.search.cluster import SlurmCluster as SlurmCluster
    from lockstep.extensions.search.parser import HyperOptArgumentParser as HyperOptArgumentParser
    from lockstep.ground.optimizers import CombinedOptimizer as CombinedOptimizer
    from lockstep.ground.seed import seed_everything as seed_everything
    from lockstep.loop.ending import Result as Result
    from lockstep.module import LightningModule as LightningModule
    from lockstep.trainer import Trainer as Trainer

# Imported on first use: the commands of a search need no torch, whose import takes 2 s.
_FILES = {
    "Callback": "callbacks.base",
    "CombinedOptimizer": "ground.optimizers",
    "LightningDataModule": "datamodule",
    "LightningModule": "module",
    "Result": "loop.ending",
    "Trainer": "trainer",
    "load_pretrained": "checkpoint.pretrained",
    "parameter_wise": "engines.owners",
    "seed_everything": "ground.seed",
}

__version__ = "0.1.0"

__all__ = listed(__name__, _FILES)


def __getattr__(name: str) -> Any:
    """Import the file that defines ``name`` when the name is first used."""
    # Modules live as long as the process. A full collection during their import would walk all of torch's objects,
    # which takes 60 to 100 ms and frees nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        return late(__name__, _FILES, name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


warn_if_installed(__path__[0])
ask_nvml()
install()
inherit()
