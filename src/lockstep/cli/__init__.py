"""The command line: LightningCLI, from the signatures of your classes (extra "cli")."""

from lockstep.cli.lightning import LightningCLI
from lockstep.cli.made import instantiate_class, instantiate_module
from lockstep.cli.parser import (
    ArgsType,
    LightningArgumentParser,
    LRSchedulerCallable,
    LRSchedulerType,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    OptimizerCallable,
    ReduceLROnPlateau,
)
from lockstep.cli.save_config import SaveConfigCallback

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]
