"""lockstep: one LightningModule, trained unchanged on one process or on many."""

import gc
from typing import TYPE_CHECKING

# Modules live as long as the process, and a full collection in the middle of their import goes through all that torch
# has made: 60 to 100 ms for nothing.
collects = gc.isenabled()
gc.disable()
try:
    from lockstep.aliases import install
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

del collects

install()
inherit()
warn_of_untried_torch()  # when the rank is known

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "DataParallel",
    "DistributedDataParallel",
    "LightningDataModule",
    "LightningModule",
    "Result",
    "Trainer",
    "seed_everything",
]
