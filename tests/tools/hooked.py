"""Options of DDPStrategy with communication hooks, for tables of ways to train that tests go through."""

from __future__ import annotations

from typing import Any

from lockstep.ground.extensions import is_there


def hooked(*names: str) -> dict[str, dict[str, Any]]:
    """The rows of these names, "communication hook" or "local steps to come"; none without the extension parallel."""
    if not is_there("parallel"):
        return {}
    from lockstep.engines.ddp.hooks import PostLocalSGDState, allreduce, post_local_sgd

    found: dict[str, dict[str, Any]] = {
        "communication hook": {"ddp_comm_hook": allreduce},
        "local steps to come": {
            "ddp_comm_state": PostLocalSGDState(start=1000),
            "ddp_comm_hook": post_local_sgd,
            "model_averaging_period": 4,
        },
    }
    return {name: found[name] for name in names}
