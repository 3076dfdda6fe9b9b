"""lockstep: one LightningModule, trained unchanged on one process or on many."""

import gc
from typing import TYPE_CHECKING, Any

# Modules live as long as the process, and a full collection in the middle of their import goes through all that torch
# has made: 60 to 100 ms for nothing.
collects = gc.isenabled()
gc.disable()
try:
    from lockstep.aliases import install, late
    from lockstep.callbacks.base import Callback
    from lockstep.datamodule import LightningDataModule
    from lockstep.ground.device import warn_of_untried_torch
    from lockstep.ground.seed import seed_everything
    from lockstep.launch.environment import inherit
    from lockstep.loop.fit import Result
    from lockstep.module import LightningModule
    from lockstep.parallel.data_parallel import DataParallel
    from lockstep.parallel.ddp import DistributedDataParallel
    from lockstep.trainer import Trainer
finally:
    if collects:
        gc.enable()

if TYPE_CHECKING:  # imported when they are asked for
    from lockstep import callbacks as callbacks
    from lockstep import loggers as loggers
    from lockstep import profilers as profilers
    from lockstep import strategies as strategies
    from lockstep import utilities as utilities
    from lockstep.hpc.cluster import SlurmCluster as SlurmCluster
    from lockstep.hpc.parser import HyperOptArgumentParser as HyperOptArgumentParser

del collects

_FILES = {"HyperOptArgumentParser": "hpc.parser", "SlurmCluster": "hpc.cluster"}


def __getattr__(name: str) -> Any:
    """Import what only a search needs when it is first used."""
    return late(__name__, _FILES, name)


install()
inherit()
warn_of_untried_torch()  # when the rank is known

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "DataParallel",
    "DistributedDataParallel",
    "HyperOptArgumentParser",
    "LightningDataModule",
    "LightningModule",
    "Result",
    "SlurmCluster",
    "Trainer",
    "seed_everything",
]
