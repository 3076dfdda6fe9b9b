"""The strategy that a plan has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy, Strategy
from lockstep.ground.extensions import load

if TYPE_CHECKING:
    from lockstep.planner.cost import Candidate

MODES = {"fsdp": "FULL_SHARD", "fsdp_grads": "SHARD_GRAD_OP", "fsdp_offload": "FULL_SHARD"}


def strategy_of(candidate: Candidate, start_method: str = "popen") -> Strategy:
    """What a candidate is in a Trainer.

    Args:
        candidate: of a plan, one that can be run.
        start_method: of its ranks, as of `DDPStrategy`; DeepSpeed's are started by the script.
    """
    again = candidate.recomputed
    if candidate.kind == "single":
        return SingleDeviceStrategy(activation_checkpointing=again or None)
    made: Strategy
    if candidate.kind == "dp":
        made = load("strategies", "dp")()
        return made
    if candidate.kind in MODES:
        return FSDPStrategy(
            sharding_strategy=MODES[candidate.kind],
            cpu_offload=candidate.kind == "fsdp_offload",
            activation_checkpointing=again or None,
            start_method=start_method,
        )
    if candidate.kind == "deepspeed":
        both = candidate.offload and candidate.stage == 3
        made = load("strategies", "deepspeed")(
            stage=candidate.stage,
            offload_optimizer=candidate.offload,
            offload_parameters=both,
            activation_checkpointing=again or None,
        )
        return made
    return DDPStrategy(
        shard_optimizer=candidate.kind == "sharded",
        bucket_cap_mb=candidate.bucket_mb,
        activation_checkpointing=again or None,
        start_method=start_method,
    )
