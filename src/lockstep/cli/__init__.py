"""The command line: LightningCLI, from the signatures of your classes (extra "cli"); and the command `lockstep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.ground.lazy_imports import late

if TYPE_CHECKING:
    from lockstep.cli.lightning import LightningCLI, SaveConfigCallback, instantiate_class, instantiate_module
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

# Imported when they are asked for: the command needs no extra.
_FILES = {
    "ArgsType": "parser",
    "LRSchedulerCallable": "parser",
    "LRSchedulerType": "parser",
    "LRSchedulerTypeTuple": "parser",
    "LRSchedulerTypeUnion": "parser",
    "LightningArgumentParser": "parser",
    "LightningCLI": "lightning",
    "OptimizerCallable": "parser",
    "ReduceLROnPlateau": "parser",
    "SaveConfigCallback": "lightning",
    "instantiate_class": "lightning",
    "instantiate_module": "lightning",
}

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


def __getattr__(name: str) -> Any:
    """Import a name's file when it is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
