"""How many loader workers this machine has room for."""

from __future__ import annotations

import os

from lockstep.ground.errors import MisconfigurationException


def suggested_max_num_workers(local_world_size: int) -> int:
    """A bound for ``num_workers``: the cores that this process may use, shared by the ranks, less one for the rank.

    Args:
        local_world_size: ranks on this machine.

    Raises:
        MisconfigurationException: fewer than one rank.
    """
    if local_world_size < 1:
        raise MisconfigurationException(
            f"suggested_max_num_workers(local_world_size={local_world_size}): give the number of ranks, 1 or more."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)
