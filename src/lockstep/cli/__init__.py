"""The command line: LightningCLI, from the signatures of your classes (extra "cli"); and the command `lockstep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.cli.lightning import (
        LightningCLI as LightningCLI,
    )
    from lockstep.cli.lightning import (
        SaveConfigCallback as SaveConfigCallback,
    )
    from lockstep.cli.lightning import (
        instantiate_class as instantiate_class,
    )
    from lockstep.cli.lightning import (
        instantiate_module as instantiate_module,
    )
    from lockstep.cli.parser import (
        ArgsType as ArgsType,
    )
    from lockstep.cli.parser import (
        LightningArgumentParser as LightningArgumentParser,
    )
    from lockstep.cli.parser import (
        LRSchedulerCallable as LRSchedulerCallable,
    )
    from lockstep.cli.parser import (
        LRSchedulerType as LRSchedulerType,
    )
    from lockstep.cli.parser import (
        LRSchedulerTypeTuple as LRSchedulerTypeTuple,
    )
    from lockstep.cli.parser import (
        LRSchedulerTypeUnion as LRSchedulerTypeUnion,
    )
    from lockstep.cli.parser import (
        OptimizerCallable as OptimizerCallable,
    )
    from lockstep.cli.parser import (
        ReduceLROnPlateau as ReduceLROnPlateau,
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

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """Import a name's file when it is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
