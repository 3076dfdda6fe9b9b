"""Names of strategies: what ``Trainer(strategy="...")`` stands for."""

from __future__ import annotations

import difflib
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.single import SingleDeviceStrategy

NAMES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "ddp": (DDPStrategy, {}),
    "ddp_find_unused_parameters_true": (DDPStrategy, {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": (DDPStrategy, {"find_unused_parameters": False}),
    "ddp_spawn": (DDPStrategy, {"start_method": "spawn"}),
    "ddp_spawn_find_unused_parameters_true": (DDPStrategy, {"start_method": "spawn"}),
    "ddp_spawn_find_unused_parameters_false": (DDPStrategy, {"start_method": "spawn"}),
}
# Names that Lightning has and lockstep does not have yet, with what to use today.
NOT_BUILT = {
    "dp": "ddp",
    "ddp_fork": "ddp_spawn",
    "ddp_notebook": "ddp_spawn",
    "fsdp": "ddp",
    "fsdp_cpu_offload": "ddp",
    "deepspeed": "ddp",
    "deepspeed_stage_1": "ddp",
    "deepspeed_stage_2": "ddp",
    "deepspeed_stage_3": "ddp",
}


def make_strategy(asked: str | Strategy, world_size: int) -> Strategy:
    """The strategy for a name or an object.

    Args:
        asked: a name, "auto" (one process: single device; several: ddp), or a Strategy.
        world_size: number of ranks of the run.

    Raises:
        MisconfigurationException: for a name that is not known or not built.
    """
    if isinstance(asked, Strategy):
        return asked
    if asked == "auto":
        return SingleDeviceStrategy() if world_size == 1 else DDPStrategy()
    if asked in NAMES:
        kind, arguments = NAMES[asked]
        return kind(**arguments)
    if asked in NOT_BUILT:
        raise MisconfigurationException(
            f'Trainer(strategy="{asked}"): lockstep does not have this strategy yet; use "{NOT_BUILT[asked]}".'
        )
    near = difflib.get_close_matches(str(asked), NAMES, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise MisconfigurationException(
        f'Trainer(strategy={asked!r}): choose "auto", {", ".join(map(repr, NAMES))}, or a Strategy object.{hint}'
    )
