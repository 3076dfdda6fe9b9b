"""Detection of ranks that ``mpirun`` started, from the variables of Open MPI, MPICH, Intel MPI and MVAPICH."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.lsf import main_host
from lockstep.cluster.world import World, first_host, missing, node_of, port_of, read_number, world_of

# rank, size, local rank, local size
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MVAPICH = tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
FAMILIES = (OPEN_MPI, MVAPICH, HYDRA)

JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
"""Variables with a number that all ranks of a job share, and that other jobs are unlikely to have."""

_WAY_OUT = "Start the script with mpirun, or remove these variables"


def given_world(environ: Mapping[str, str]) -> World | None:
    """Return the World of a process that ``mpirun`` started as a rank. None in any other process.

    mpirun does not pass the host of rank 0. The host is ``MASTER_ADDR`` if set, or this host if all ranks are here, or
    the first host of the surrounding SLURM or LSF job. The port is ``MASTER_PORT`` or derived from the job's id.

    Raises:
        MisconfigurationException: a variable is missing, is not a number, or contradicts another.
    """
    names = _family(environ)
    if names is None:
        return None
    rank, size, local_rank, local_size = (read_number(environ, name) for name in names)
    node, nodes = node_of(rank, local_rank, local_size, size)
    port = port_of(environ, _job(environ))
    if port is None:
        raise missing(
            "MPI", "MASTER_PORT", "set it to a free port, the same for all ranks, because no variable has a job id"
        )
    return world_of(
        "MPI",
        environ,
        (*names, "MASTER_PORT"),
        _WAY_OUT,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        address=environ.get("MASTER_ADDR") or _address(environ, nodes),
        port=port,
    )


def _family(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of environment variables that this process' MPI implementation sets; None without MPI."""
    for names in FAMILIES:
        if names[0] in environ and names[1] in environ:
            if names is HYDRA and names[2] not in environ and "SLURM_STEP_ID" in environ:
                return None  # `srun --mpi=pmi2` sets the first two variables itself
            return names
    return None


def _address(environ: Mapping[str, str], nodes: int) -> str:
    if nodes == 1:
        return "127.0.0.1"
    if environ.get("SLURM_JOB_NODELIST"):
        return first_host(environ["SLURM_JOB_NODELIST"])
    host = main_host(environ, nodes)
    if host is None:
        way_out = (
            "set it to the host of rank 0: mpirun -x MASTER_ADDR=... (Open MPI), mpirun -genv MASTER_ADDR ... (MPICH)"
        )
        raise missing("MPI", "MASTER_ADDR", way_out)
    return host


def _job(environ: Mapping[str, str]) -> int | None:
    for name in JOBS:
        digits = "".join(sign for sign in environ.get(name, "").split(".")[0].split("@")[-1] if sign.isdigit())
        if digits:
            return int(digits)
    return None
