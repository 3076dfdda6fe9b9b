"""A process that a rank started, and that takes itself for the rank: it has inherited the rank's variables."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from lockstep.cluster.base import World
from lockstep.ground.errors import MisconfigurationException

RANK_OF = "LOCKSTEP_RANK_OF"
"""The variable with the process that is a rank, and the meeting that it belongs to."""

VARIABLES = "RANK LOCAL_RANK NODE_RANK GROUP_RANK WORLD_SIZE MASTER_PORT SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK"
"""Variables by which a rank knows itself."""


def check_not_nested(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Note that this process is a rank, for those that it starts; refuse to be one beside the one that started it.

    It would wait for ranks that have no use for it, at a port that is taken.

    Args:
        world: of this process, among others that are there.
        environ: the environment.

    Raises:
        MisconfigurationException: another process is this rank already.
    """
    if world.size == 1:
        return
    meeting = f"{world.rank}/{world.size} {world.address}:{world.port}"
    process, _, known = environ.get(RANK_OF, "").partition(" ")
    if known == meeting and process != str(os.getpid()):
        there = " ".join(f"-u {name}" for name in VARIABLES.split() if name in environ)
        raise MisconfigurationException(
            f"this process takes itself for rank {world.rank} of {world.size} at {world.address}:{world.port}, and "
            f"that is process {process}, which started this one and handed its variables down: start a run inside of a "
            f"run without them (env {there} ...), as one process: devices=1"
        )
    environ[RANK_OF] = f"{os.getpid()} {meeting}"
