"""The Trainer's ``devices`` and ``num_nodes`` against the ranks that a cluster has started, or is to start."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.base import World
from lockstep.cluster.slurm import Allocation
from lockstep.cluster.table import Cluster
from lockstep.cluster.torchelastic import STARTED
from lockstep.ground.errors import MisconfigurationException


def compare(cluster: Cluster, given: World, devices: int | None, num_nodes: int, environ: Mapping[str, str]) -> None:
    """Refuse flags that ask for another world than the one that was started.

    Args:
        cluster: who started it.
        given: the world.
        devices: ranks on each node; None: as many as there are, and ``num_nodes`` of 1 is no wish then either.
        num_nodes: how many nodes.
        environ: the environment.

    Raises:
        MisconfigurationException: with the flags that fit, and for SLURM the batch script's lines that fit the flags.
    """
    who = _who(cluster, environ)
    fits = f"devices={given.local_size}, num_nodes={given.num_nodes}, or devices='auto'"
    if devices is None:
        if num_nodes not in (1, given.num_nodes):
            raise MisconfigurationException(
                f"num_nodes={num_nodes}, but {who} started {given.num_nodes}: use "
                f"num_nodes={given.num_nodes}" + _lines(cluster, None, num_nodes, environ)
            )
        return
    if devices * num_nodes != given.size:
        count = "WORLD_SIZE=" if cluster.name in ("torchelastic", "kubeflow") else "world size "
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {devices * num_nodes} rank(s), but {who} "
            f"started {given.size} ({count}{given.size}): use {fits}, or start the script "
            + _otherwise(cluster, devices, num_nodes, environ)
            + _lines(cluster, devices, num_nodes, environ)
        )
    if cluster.name != "torchelastic" and num_nodes != given.num_nodes:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes}, but {cluster.started} put the {given.size} ranks on "
            f"{given.num_nodes} node(s): use {fits}" + _lines(cluster, devices, num_nodes, environ)
        )


def compare_allocation(job: Allocation, devices: int | None, num_nodes: int, environ: Mapping[str, str]) -> None:
    """Refuse flags that ask for other ranks than the tasks of the SLURM job in whose batch script this process is.

    Raises:
        MisconfigurationException: with the lines of a batch script that fit the flags.
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
        f"{wanted}, but the SLURM job {job.job} has {job.nodes} node(s) with {tasks}: use {flags}; for one process "
        "that is no rank of the job, start the script by `srun --ntasks=1`" + lines_for(devices, num_nodes, environ)
    )


def lines_for(devices: int | None, num_nodes: int, environ: Mapping[str, str]) -> str:
    """The lines of a batch script for these flags, as the end of a sentence."""
    lines = [f"#SBATCH --nodes={num_nodes}"]
    if devices is not None:
        lines.append(f"#SBATCH --ntasks-per-node={devices}")
        if any(environ.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")):
            lines.append(f"#SBATCH --gres=gpu:{devices}")
    return "; or submit the job with\n" + "\n".join(lines)


def _lines(cluster: Cluster, devices: int | None, num_nodes: int, environ: Mapping[str, str]) -> str:
    return lines_for(devices, num_nodes, environ) if cluster.name == "slurm" else ""


def _who(cluster: Cluster, environ: Mapping[str, str]) -> str:
    words = environ.get(STARTED) if cluster.name == "torchelastic" else None
    return cluster.started if words is None else f"`lockstep run {words}`"


def _otherwise(cluster: Cluster, devices: int, num_nodes: int, environ: Mapping[str, str]) -> str:
    if cluster.name == "torchelastic" and STARTED in environ:
        return f"by `lockstep run --devices {devices}{f' --nodes {num_nodes}' if num_nodes > 1 else ''}`"
    if cluster.name == "kubeflow":
        return "by torchrun in each pod (PyTorchJob's nprocPerNode)"
    return f"without {cluster.started}" if cluster.name != "slurm" else "in another job"
