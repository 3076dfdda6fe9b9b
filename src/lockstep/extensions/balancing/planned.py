"""Functions that create strategies: from a candidate of a plan, or from the file of a saved plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy, Strategy
from lockstep.extensions.balancing.planner.plan import SavedPlan
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import load

if TYPE_CHECKING:
    from lockstep.extensions.balancing.planner.cost import Candidate

MODES = {"fsdp": "FULL_SHARD", "fsdp_grads": "SHARD_GRAD_OP", "fsdp_offload": "FULL_SHARD"}


def strategy_of(candidate: Candidate, start_method: str = "popen") -> Strategy:
    """Create the strategy that a plan's candidate describes.

    Args:
        candidate: a candidate that can run.
        start_method: start method of its ranks, see `DDPStrategy`. DeepSpeed's ranks always run the script.
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


def drives_all_devices(path: str) -> bool:
    """Return True if the saved plan in a file uses all devices of a node from one process."""
    return SavedPlan.read(path).strategy == "dp"


def strategy_by(path: str, world_size: int, interactive: bool) -> Strategy:
    """Create the strategy that the saved plan in the file ``path`` describes.

    Args:
        path: file of the plan.
        world_size: number of ranks of the run.
        interactive: True in a session without a script that could be started once for each rank.

    Raises:
        MisconfigurationException: the file is not a plan, or the plan is for other devices.
    """
    saved, where = SavedPlan.read(path), f'Trainer(strategy="{path}")'
    ranks = 1 if saved.strategy == "dp" else saved.devices * saved.nodes
    if ranks != world_size:
        raise MisconfigurationException(
            f"{where}: the plan was made for devices={saved.devices} and num_nodes={saved.nodes}, and this Trainer has "
            f"{world_size} rank(s): use the plan's devices and nodes, or create a plan for these."
        )
    made = strategy_of(saved.candidate, "spawn" if interactive else "popen")
    made.planned = saved, where
    return made
