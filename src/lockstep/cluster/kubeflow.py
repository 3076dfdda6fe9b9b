"""Detection of Kubeflow's PyTorchJob: one rank per pod, with ``RANK`` and ``WORLD_SIZE`` but no ``LOCAL_RANK``."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.world import World, missing, read_number, world_of

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_WAY_OUT = "Run one process in each pod and set RANK from 0 to WORLD_SIZE - 1, or remove the variables"


def given_world(environ: Mapping[str, str]) -> World | None:
    """Return the World of a rank in a pod of its own; None if the environment variables do not describe such a rank.

    For such a rank ``RANK`` and ``WORLD_SIZE`` are set, but ``LOCAL_RANK`` is not.

    Raises:
        MisconfigurationException: a variable is missing, is not a number, or contradicts another.
    """
    if not {"RANK", "WORLD_SIZE"} <= environ.keys() or "LOCAL_RANK" in environ:
        return None
    rank, size = read_number(environ, "RANK"), read_number(environ, "WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ and size > 1:
            way_out = f"set it as PyTorchJob does, or remove RANK={rank} and WORLD_SIZE={size}"
            raise missing("Kubeflow (RANK and WORLD_SIZE)", name, way_out)
    local_rank, local_size, node, nodes = 0, 1, rank, size
    # a user may set RANK and WORLD_SIZE around the tasks of srun
    if "SLURM_LOCALID" in environ and "SLURM_STEP_ID" in environ:
        local_rank = read_number(environ, "SLURM_LOCALID")
        nodes = read_number(environ, "SLURM_STEP_NUM_NODES", default=1)
        node, local_size = read_number(environ, "SLURM_NODEID", default=0), max(1, size // nodes)
    return world_of(
        "Kubeflow (RANK and WORLD_SIZE)",
        environ,
        _NAMES,
        _WAY_OUT,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=read_number(environ, "MASTER_PORT", default=0),
    )
