"""Find out, from environment and flags, which rank this process is and whether others must be started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.cluster import local, slurm
from lockstep.cluster.base import World, read_number
from lockstep.cluster.flags import compare, compare_allocation
from lockstep.cluster.table import CLUSTERS, LOCAL, find


@dataclass(frozen=True)
class Placement:
    """This process' world, and how it came about."""

    world: World
    launched: bool  #: the ranks are there; False: this process is local rank 0 and has to start the others
    cluster: str = LOCAL  #: who placed the ranks; anybody but "local" chose their devices too
    by_srun: bool = False  #: this process is a SLURM job's batch script, and no rank: srun has to start them all


def detect(
    environ: Mapping[str, str], devices: int | None = None, num_nodes: int = 1, named: str | None = None
) -> Placement:
    """Where this process stands.

    Args:
        environ: the environment.
        devices: ranks on each node; None for ``devices="auto"``: as many as a launcher started, else 1.
        num_nodes: how many nodes.
        named: the only cluster to look for, a name of `lockstep.cluster.table.NAMES`; None: all, and the table says
            which of them wins.

    Raises:
        MisconfigurationException: flags and launcher contradict each other, or a variable is missing.

    Example:
        >>> placement = detect({}, devices=2)
        >>> placement.launched, placement.world.rank, placement.world.size
        (False, 0, 2)
    """
    found = None if named == LOCAL else find(environ, named)
    if found is not None:
        cluster, given = found
        compare(cluster, given, devices, num_nodes, environ)
        return Placement(given, launched=True, cluster=cluster.name)
    started = local.is_started(environ)
    if named in (None, "slurm") and not started:
        job = slurm.allocation(environ)
        if job is not None:
            compare_allocation(job, devices, num_nodes, environ)
            world = World(0, job.tasks, 0, job.counts[0], 0, job.nodes, "127.0.0.1", 0)
            return Placement(world, launched=False, cluster="slurm", by_srun=True)
    if devices is None:
        devices = max(read_number(environ, "WORLD_SIZE", default=1) // num_nodes, 1) if started else 1
    return Placement(local.local_world(environ, devices, num_nodes), launched=started)


def is_placed(environ: Mapping[str, str], named: str | None = None) -> bool:
    """Whether a cluster has started this process as a rank, or is about to start ranks in its place."""
    if named == LOCAL:
        return False
    return find(environ, named) is not None or (not local.is_started(environ) and slurm.allocation(environ) is not None)


def early_rank(environ: Mapping[str, str]) -> int:
    """This process' rank as far as it can be told before the flags are known: 0 on global rank 0 only."""
    if "RANK" in environ:
        return read_number(environ, "RANK")
    if local.is_started(environ):
        return read_number(environ, "LOCAL_RANK") or read_number(environ, "NODE_RANK", default=0)
    for cluster in CLUSTERS:
        for name in cluster.rank:
            if name in environ and (cluster.name != "slurm" or slurm.is_task(environ)):
                return read_number(environ, name)
    return read_number(environ, "NODE_RANK", default=0)
