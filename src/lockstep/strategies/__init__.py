"""The strategies, by the names that users import."""

from lockstep.strategies.base import SingleDeviceStrategy, Strategy
from lockstep.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "SingleDeviceStrategy", "Strategy"]
