"""The strategies, by the names that users import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.strategies.balanced import BalancedStrategy as BalancedStrategy
    from lockstep.strategies.base import SingleDeviceStrategy as SingleDeviceStrategy
    from lockstep.strategies.base import Strategy as Strategy
    from lockstep.strategies.ddp import DDPStrategy as DDPStrategy
    from lockstep.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from lockstep.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from lockstep.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy

# Imported when they are asked for, as all names of a face.
_FILES = {
    "BalancedStrategy": "balanced",
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "model_parallel",
    "SingleDeviceStrategy": "base",
    "Strategy": "base",
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """Import a strategy's file when its name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
