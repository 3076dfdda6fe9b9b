"""Strategies, under the names that users import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late, listed

if TYPE_CHECKING:
    from lockstep.engines.ddp.strategy import DDPStrategy as DDPStrategy
    from lockstep.engines.sharded.fsdp import FSDPStrategy as FSDPStrategy
    from lockstep.engines.sharded.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from lockstep.engines.strategy import SingleDeviceStrategy as SingleDeviceStrategy
    from lockstep.engines.strategy import Strategy as Strategy
    from lockstep.extensions.balancing.pipeline.strategy import BalancedStrategy as BalancedStrategy
    from lockstep.extensions.deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy

# imported when their names are first used
_FILES = {
    "DDPStrategy": ".engines.ddp.strategy",
    "FSDPStrategy": ".engines.sharded.fsdp",
    "ModelParallelStrategy": ".engines.sharded.model_parallel",
    "SingleDeviceStrategy": ".engines.strategy",
    "Strategy": ".engines.strategy",
}

__all__ = listed(__name__, _FILES)


def __getattr__(name: str) -> Any:
    """Import a strategy's file when its name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
