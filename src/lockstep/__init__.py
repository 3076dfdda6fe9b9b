"""lockstep: one LightningModule, trained unchanged on one process or on many."""

from lockstep.callbacks.base import Callback
from lockstep.datamodule import LightningDataModule
from lockstep.ground.seed import seed_everything
from lockstep.launch.inherit import inherit
from lockstep.loop.fit import Result
from lockstep.module import LightningModule
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.trainer import Trainer

inherit()

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "DistributedDataParallel",
    "LightningDataModule",
    "LightningModule",
    "Result",
    "Trainer",
    "seed_everything",
]
