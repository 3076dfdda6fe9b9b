"""The clusters that lockstep knows, and which of them wins where the variables of several are set."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster import kubeflow, lsf, mpi, slurm, torchelastic
from lockstep.cluster.base import World
from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class Cluster:
    """One of them."""

    name: str  #: as in ``DDPStrategy(cluster_environment=...)``
    started: str  #: who has started the ranks, as a sentence says it
    given_world: Callable[[Mapping[str, str]], World | None]
    rank: tuple[str, ...]  #: variables with the rank, for the lines of a script before its Trainer
    needs: str  #: what has to be set where it is asked for by name


CLUSTERS = (
    # RANK and WORLD_SIZE say what somebody wanted; what a scheduler set around them may speak of other processes:
    # under torchrun in a SLURM job, SLURM_PROCID is the number of the agent.
    Cluster("torchelastic", "torchrun", torchelastic.given_world, ("RANK",), "RANK, LOCAL_RANK and WORLD_SIZE"),
    Cluster(
        "kubeflow", "Kubeflow", kubeflow.given_world, ("RANK",), "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone"
    ),
    # jsrun sets Open MPI's variables, too, and knows the hosts
    Cluster("lsf", "jsrun", lsf.given_world, ("JSM_NAMESPACE_RANK",), "JSM_NAMESPACE_RANK"),
    # mpirun in a SLURM job starts one task of srun's on each node, and the ranks below it
    Cluster(
        "mpi", "mpirun", mpi.given_world, tuple(names[0] for names in mpi.FAMILIES), "OMPI_COMM_WORLD_RANK or PMI_RANK"
    ),
    Cluster("slurm", "srun", slurm.given_world, ("SLURM_PROCID",), "SLURM_PROCID and SLURM_STEP_ID"),
)
"""The first whose variables are there wins; behind them all come the ranks that lockstep starts by itself."""

LOCAL = "local"
NAMES = {
    **{cluster.name: cluster.name for cluster in CLUSTERS},
    "local": LOCAL,
    "lightning": LOCAL,
    "torchrun": "torchelastic",
    "openmpi": "mpi",
}
"""What ``cluster_environment=`` may say, in small letters."""
SPELLED = "'TorchElastic', 'SLURM', 'LSF', 'Kubeflow', 'MPI' or 'Local'"


def cluster_named(name: str) -> str:
    """The cluster that a user named, in any letters.

    Raises:
        MisconfigurationException: there is none of this name.

    Example:
        >>> cluster_named("TorchElastic")
        'torchelastic'
    """
    plain = name.strip().lower().removesuffix("environment") if isinstance(name, str) else ""
    if plain in NAMES:
        return NAMES[plain]
    near = difflib.get_close_matches(plain, NAMES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise MisconfigurationException(
        f"cluster_environment={name!r}: choose {SPELLED}, or give a ClusterEnvironment object.{hint}"
    )


def find(environ: Mapping[str, str], named: str | None = None) -> tuple[Cluster, World] | None:
    """The cluster that started this process, and its world; None where none did.

    Args:
        environ: the environment.
        named: look at this one only.

    Raises:
        MisconfigurationException: its variables are incomplete or contradict each other, or the one that was named did
            not start this process.
    """
    for cluster in CLUSTERS:
        if named in (None, cluster.name):
            world = cluster.given_world(environ)
            if world is not None:
                return cluster, world
            if named is not None and not (named == "slurm" and slurm.is_batch(environ)):
                raise MisconfigurationException(
                    f"cluster_environment={named!r}: {cluster.started} did not start this process, which needs "
                    f"{cluster.needs}: start the script that way, or leave cluster_environment and plugins out"
                )
    return None
