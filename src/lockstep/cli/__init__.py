"""LightningCLI, which builds a command line from signatures (extra ``cli``), and the command ``lockstep``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late, listed

if TYPE_CHECKING:
    from lockstep.extensions.lightning.command_line import (
        LightningCLI as LightningCLI,
    )
    from lockstep.extensions.lightning.command_line import (
        SaveConfigCallback as SaveConfigCallback,
    )
    from lockstep.extensions.lightning.command_line import (
        instantiate_class as instantiate_class,
    )
    from lockstep.extensions.lightning.command_line import (
        instantiate_module as instantiate_module,
    )
    from lockstep.extensions.lightning.parser import (
        ArgsType as ArgsType,
    )
    from lockstep.extensions.lightning.parser import (
        LightningArgumentParser as LightningArgumentParser,
    )
    from lockstep.extensions.lightning.parser import (
        LRSchedulerCallable as LRSchedulerCallable,
    )
    from lockstep.extensions.lightning.parser import (
        LRSchedulerType as LRSchedulerType,
    )
    from lockstep.extensions.lightning.parser import (
        LRSchedulerTypeTuple as LRSchedulerTypeTuple,
    )
    from lockstep.extensions.lightning.parser import (
        LRSchedulerTypeUnion as LRSchedulerTypeUnion,
    )
    from lockstep.extensions.lightning.parser import (
        OptimizerCallable as OptimizerCallable,
    )
    from lockstep.extensions.lightning.parser import (
        ReduceLROnPlateau as ReduceLROnPlateau,
    )

__all__ = listed(__name__, {})


def __getattr__(name: str) -> Any:
    """Import the file of a public name when the name is first used."""
    return late(__name__, {}, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
