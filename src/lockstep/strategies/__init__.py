"""The strategies, by the names that users import."""

from lockstep.strategies.base import SingleDeviceStrategy, Strategy
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.fsdp import FSDPStrategy

__all__ = ["DDPStrategy", "FSDPStrategy", "SingleDeviceStrategy", "Strategy"]
