"""Detection of this process' rank, and of whether it has to start the other ranks.

Environment variables and the Trainer's flags determine the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster import kubeflow, local, lsf, mpi, slurm, torchelastic
from lockstep.cluster.slurm import Allocation
from lockstep.cluster.torchelastic import STARTED
from lockstep.cluster.world import World, read_number
from lockstep.ground.errors import MisconfigurationException

# -- known clusters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A cluster that lockstep recognizes from environment variables."""

    name: str  #: as in ``DDPStrategy(cluster_environment=...)``
    started: str  #: the program that started the ranks, for messages
    given_world: Callable[[Mapping[str, str]], World | None]
    rank: tuple[str, ...]  #: variables with the rank, for the lines of a script before its Trainer
    needs: str  #: variables that must be set if the cluster is chosen by name


CLUSTERS = (
    # RANK and WORLD_SIZE are explicit. A scheduler's variables around them may describe other processes: under torchrun
    # in a SLURM job, SLURM_PROCID is the number of the agent.
    Cluster("torchelastic", "torchrun", torchelastic.given_world, ("RANK",), "RANK, LOCAL_RANK and WORLD_SIZE"),
    Cluster(
        "kubeflow", "Kubeflow", kubeflow.given_world, ("RANK",), "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone"
    ),
    # jsrun also sets Open MPI's variables, and knows the hosts
    Cluster("lsf", "jsrun", lsf.given_world, ("JSM_NAMESPACE_RANK",), "JSM_NAMESPACE_RANK"),
    # mpirun in a SLURM job starts one srun task per node, which starts the ranks
    Cluster(
        "mpi", "mpirun", mpi.given_world, tuple(names[0] for names in mpi.FAMILIES), "OMPI_COMM_WORLD_RANK or PMI_RANK"
    ),
    Cluster("slurm", "srun", slurm.given_world, ("SLURM_PROCID",), "SLURM_PROCID and SLURM_STEP_ID"),
)
"""The first cluster whose variables are set wins. Without any, lockstep starts the ranks itself."""

LOCAL = "local"
NAMES = {
    **{cluster.name: cluster.name for cluster in CLUSTERS},
    "local": LOCAL,
    "lightning": LOCAL,
    "torchrun": "torchelastic",
    "openmpi": "mpi",
}
"""Valid values of ``cluster_environment=``, in lower case."""
CHOICES = "'TorchElastic', 'SLURM', 'LSF', 'Kubeflow', 'MPI' or 'Local'"


def cluster_named(name: str) -> str:
    """Convert a user's name of a cluster, in upper or lower case, to lockstep's name.

    Raises:
        MisconfigurationException: there is no cluster of this name.

    Example:
        >>> cluster_named("TorchElastic")
        'torchelastic'
    """
    plain = name.strip().lower().removesuffix("environment") if isinstance(name, str) else ""
    if plain in NAMES:
        return NAMES[plain]
    raise MisconfigurationException(
        f"cluster_environment={name!r} is unknown: choose {CHOICES}, or pass a ClusterEnvironment object."
    )


def find(environ: Mapping[str, str], named: str | None = None) -> tuple[Cluster, World] | None:
    """Return (cluster that started this process, World that its variables describe), or None without a cluster.

    Args:
        environ: the environment.
        named: the only cluster to check; None: all.

    Raises:
        MisconfigurationException: the cluster's variables are incomplete or contradict each other, or the named cluster
            did not start this process.
    """
    for cluster in CLUSTERS:
        if named in (None, cluster.name):
            world = cluster.given_world(environ)
            if world is not None:
                return cluster, world
            if named is not None and not (named == "slurm" and slurm.is_batch(environ)):
                raise MisconfigurationException(
                    f"cluster_environment={named!r}, but {cluster.started} did not start this process, since it would "
                    f"have set {cluster.needs}: start the script with {cluster.started}, or omit cluster_environment "
                    "and plugins"
                )
    return None


# -- comparison of flags and cluster -------------------------------------------------------------------------


def compare(cluster: Cluster, given: World, devices: int | None, num_nodes: int, environ: Mapping[str, str]) -> None:
    """Raise an error if the Trainer's flags do not match the numbers of ranks and nodes that a launcher started.

    Args:
        cluster: the cluster that started the ranks.
        given: the World of the started ranks.
        devices: number of ranks on each node; None: any number. With None, ``num_nodes=1`` fits any number of nodes.
        num_nodes: number of nodes.
        environ: the environment.

    Raises:
        MisconfigurationException: the flags do not match. The message names matching flags.
    """
    launcher = _launcher_name(cluster, environ)
    fits = f"devices={given.local_size}, num_nodes={given.num_nodes}, or devices='auto'"
    if devices is None:
        if num_nodes not in (1, given.num_nodes):
            raise MisconfigurationException(
                f"num_nodes={num_nodes}, but {launcher} started ranks on {given.num_nodes} node(s): "
                f"use num_nodes={given.num_nodes}"
            )
        return
    if devices * num_nodes != given.size:
        count = "WORLD_SIZE=" if cluster.name in ("torchelastic", "kubeflow") else "world size "
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {devices * num_nodes} rank(s), but {launcher} "
            f"started {given.size} ({count}{given.size}): use {fits}"
        )
    if cluster.name != "torchelastic" and num_nodes != given.num_nodes:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes}, but {cluster.started} put the {given.size} ranks on "
            f"{given.num_nodes} node(s): use {fits}"
        )


def compare_allocation(job: Allocation, devices: int | None, num_nodes: int) -> None:
    """Raise an error if the Trainer's flags do not match the numbers of ranks and nodes of a SLURM job.

    The calling process is the job's batch script.

    Raises:
        MisconfigurationException: the flags do not match. The message names matching flags.
    """
    even = len(set(job.counts)) == 1
    if devices is None and num_nodes in (1, job.nodes):
        return
    if devices is not None and num_nodes == job.nodes and even and job.counts[0] == devices:
        return
    wanted = f"num_nodes={num_nodes}" if devices is None else f"devices={devices}, num_nodes={num_nodes}"
    tasks = f"{job.counts[0]} task(s) on each" if even else f"{', '.join(map(str, job.counts))} tasks"
    flags = f"devices={job.counts[0]}, num_nodes={job.nodes}" if even else "devices='auto'"
    raise MisconfigurationException(
        f"{wanted}, but the SLURM job {job.job} has {job.nodes} node(s) with {tasks}: use {flags}, or start a single "
        "process with `srun --ntasks=1`"
    )


def _launcher_name(cluster: Cluster, environ: Mapping[str, str]) -> str:
    words = environ.get(STARTED) if cluster.name == "torchelastic" else None
    return cluster.started if words is None else f"`lockstep run {words}`"


# -- detection -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The World of this process, the cluster that placed the ranks, and whether the ranks still have to be started."""

    world: World
    launched: bool  #: the ranks are running; False: this process is local rank 0 and has to start the others
    cluster: str = LOCAL  #: the cluster that placed the ranks; unless "local", it assigned their devices, too
    by_srun: bool = False  #: this process is a SLURM job's batch script, not a rank: srun has to start all ranks


def detect(
    environ: Mapping[str, str], devices: int | None = None, num_nodes: int = 1, named: str | None = None
) -> Placement:
    """Return this process's `Placement`: its World, its cluster, and whether ranks still have to be started.

    Args:
        environ: the environment.
        devices: number of ranks on each node; None for ``devices="auto"``: as many as a launcher started, else 1.
        num_nodes: number of nodes.
        named: the only cluster to look for, a value of `lockstep.cluster.detect.NAMES`; None: all, in the order of
            `CLUSTERS`.

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
            compare_allocation(job, devices, num_nodes)
            world = World(0, job.tasks, 0, job.counts[0], 0, job.nodes, "127.0.0.1", 0)
            return Placement(world, launched=False, cluster="slurm", by_srun=True)
    if devices is None:
        devices = max(read_number(environ, "WORLD_SIZE", default=1) // num_nodes, 1) if started else 1
    return Placement(local.local_world(environ, devices, num_nodes), launched=started)


def is_placed(environ: Mapping[str, str], named: str | None = None) -> bool:
    """Return True if a cluster started this process as a rank, or if this process will replace itself with srun."""
    if named == LOCAL:
        return False
    return find(environ, named) is not None or (not local.is_started(environ) and slurm.allocation(environ) is not None)


def early_rank(environ: Mapping[str, str]) -> int:
    """Return a provisional rank for this process, before the Trainer's flags are known. Only global rank 0 gets 0."""
    if "RANK" in environ:
        return read_number(environ, "RANK")
    if local.is_started(environ):
        return read_number(environ, "LOCAL_RANK") or read_number(environ, "NODE_RANK", default=0)
    for cluster in CLUSTERS:
        for name in cluster.rank:
            # a batch script has SLURM_PROCID, too, but is not a rank
            if name in environ and (cluster.name != "slurm" or slurm.is_task(environ)):
                return read_number(environ, name)
    return read_number(environ, "NODE_RANK", default=0)


# -- explanation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvironmentFinding:
    """Result of `explained`: the cluster that was found for this process, and the reason in words."""

    cluster: str | None  #: a name of `CLUSTERS`, "local" for a rank that lockstep started; None: no launcher started it
    why: str  #: one sentence
    world: World | None = None  #: None if no Trainer could start, or srun would have to start the ranks


def explained(environ: Mapping[str, str] = os.environ) -> EnvironmentFinding:
    """Detect the cluster of this process, and explain the result or the error in words.

    The result is that of a Trainer without ``devices``.

    Example:
        >>> explained({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1234"}).cluster
        'torchelastic'
    """
    for cluster in CLUSTERS:
        try:
            world = cluster.given_world(environ)
        except MisconfigurationException as error:
            return EnvironmentFinding(cluster.name, f"its variables are set, but invalid: {error}")
        if world is not None:
            return EnvironmentFinding(cluster.name, f"{cluster.started} started this process", world)
    try:
        if local.is_started(environ):
            return EnvironmentFinding(LOCAL, "lockstep started this process", detect(environ).world)
        job = slurm.allocation(environ)
        if job is not None:
            why = f"this is the batch script of the SLURM job {job.job}, not a rank; a Trainer starts its {job.tasks} "
            return EnvironmentFinding("slurm", why + "tasks with srun")
        return EnvironmentFinding(
            None, "no launcher has started this process; a Trainer starts the ranks", detect(environ).world
        )
    except MisconfigurationException as error:
        return EnvironmentFinding(None, f"no launcher has started this process, and a Trainer cannot start: {error}")
