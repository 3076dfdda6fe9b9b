"""Type aliases, importable from here as in Lightning."""

from lockstep.ground.types import (
    EVAL_DATALOADERS,
    EVALUATE_OUTPUT,
    PREDICT_OUTPUT,
    STEP_OUTPUT,
    TRAIN_DATALOADERS,
    LRSchedulerConfig,
    LRSchedulerConfigType,
    LRSchedulerPLType,
    LRSchedulerType,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    OptimizerConfig,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)

__all__ = [
    "EVALUATE_OUTPUT",
    "EVAL_DATALOADERS",
    "PREDICT_OUTPUT",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]
