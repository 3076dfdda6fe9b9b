"""The strategies, by the names that users import."""

from lockstep.strategies.balanced import BalancedStrategy
from lockstep.strategies.base import SingleDeviceStrategy, Strategy
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.deepspeed import DeepSpeedStrategy
from lockstep.strategies.fsdp import FSDPStrategy
from lockstep.strategies.model_parallel import ModelParallelStrategy

__all__ = [
    "BalancedStrategy",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]
