"""The strategies, by the names that users import."""

from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.single import SingleDeviceStrategy

__all__ = ["DDPStrategy", "SingleDeviceStrategy", "Strategy"]
