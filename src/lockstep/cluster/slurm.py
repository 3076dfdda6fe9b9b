"""Detection of ranks that SLURM's ``srun`` started, and of SLURM batch scripts, which are not ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.cluster.world import World, first_host, port_of, read_number, tasks_per_node, world_of

INTERACTIVE = ("bash", "interactive")
"""Job names of interactive shells. A script started in such a shell is a single process."""

STARTS = "LOCKSTEP_TRIAL_STARTS"
"""Environment variable with the number of starts of a search trial before it was submitted as this job."""

_SPECIAL = 0xFFFFFFF0
"""Smallest step number that SLURM reserves for itself, for the batch script or an allocation's shell."""

_WAY_OUT = "Start the script with srun, or remove the SLURM_* variables"


def is_task(environ: Mapping[str, str]) -> bool:
    """Return True if ``srun`` started this process as a task of a SLURM job step.

    A batch script's shell also has SLURM_PROCID=0 and SLURM_NTASKS, but is in no step.
    """
    if "SLURM_PROCID" not in environ or "SLURM_JOB_ID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SPECIAL and not (is_interactive(environ) and _tasks(environ) == 1)


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Return True if this process runs in an interactive shell of a SLURM job."""
    return environ.get("SLURM_JOB_NAME") in INTERACTIVE or "SLURM_PTY_PORT" in environ


def is_batch(environ: Mapping[str, str]) -> bool:
    """Return True if this process is a SLURM batch script, which still has to start its tasks with srun."""
    if "SLURM_JOB_ID" not in environ or is_interactive(environ):
        return False
    return "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ


def is_only_task(environ: Mapping[str, str]) -> bool:
    """Return True if this process is a batch script whose job has a single task, which needs no srun."""
    return is_batch(environ) and "SLURM_PROCID" in environ and allocation(environ) is None


def given_world(environ: Mapping[str, str]) -> World | None:
    """Return the World (ranks and nodes) of a process that ``srun`` started as a task; None for any other process.

    Nodes may have different numbers of tasks (``2(x3),1``). The rendezvous is on the first host of the step's list, at
    a port derived from the numbers of the job, the step and the attempt. ``MASTER_ADDR`` and ``MASTER_PORT`` take
    precedence.

    Raises:
        MisconfigurationException: a variable is missing, is not a number, or contradicts another.
    """
    if not is_task(environ):
        return None
    node, local_rank = read_number(environ, "SLURM_NODEID"), read_number(environ, "SLURM_LOCALID")
    counts = _counts(environ)
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((environ[name] for name in lists if environ.get(name)), "127.0.0.1")
    step = read_number(environ, "SLURM_STEP_ID", default=read_number(environ, "SLURM_STEPID", default=0))
    # a new port for each attempt: ranks left over from an earlier one may still hold its port
    port = port_of(environ, read_number(environ, "SLURM_JOB_ID"), step, attempt(environ))
    assert port is not None
    return world_of(
        "SLURM",
        environ,
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "MASTER_PORT"),
        _WAY_OUT,
        rank=read_number(environ, "SLURM_PROCID"),
        size=_tasks(environ),
        local_rank=local_rank,
        local_size=counts[node] if node < len(counts) else 0,
        node_rank=node,
        num_nodes=len(counts),
        address=environ.get("MASTER_ADDR") or first_host(hosts),
        port=port,
    )


@dataclass(frozen=True)
class Allocation:
    """Numbers of nodes and tasks of a SLURM job, read from the environment of the job's batch script."""

    job: str
    nodes: int
    tasks: int  #: on all nodes
    counts: tuple[int, ...]  #: tasks on each node


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the `Allocation` of a SLURM job with several tasks, if this process is the job's batch script.

    Return None in any other process.
    """
    if not is_batch(environ):
        return None
    nodes = read_number(environ, "SLURM_NNODES", default=read_number(environ, "SLURM_JOB_NUM_NODES", default=1))
    counts = tuple(_counts(environ)) if "SLURM_TASKS_PER_NODE" in environ else (1,) * nodes
    # without SLURM_NTASKS, SLURM_TASKS_PER_NODE counts processors
    if "SLURM_NTASKS" not in environ:
        counts = (1,) * nodes
    tasks = read_number(environ, "SLURM_NTASKS", default=nodes)
    return None if tasks == 1 else Allocation(environ["SLURM_JOB_ID"], nodes, tasks, counts)


def attempt(environ: Mapping[str, str]) -> int:
    """Return the number of earlier starts of this SLURM job; 0 outside a job.

    In a trial of a search, earlier starts of the trial count as well.
    """
    if "SLURM_JOB_ID" not in environ:
        return 0
    return read_number(environ, STARTS, default=0) + read_number(environ, "SLURM_RESTART_COUNT", default=0)


def job_name(environ: Mapping[str, str]) -> str | None:
    """Return the id of this job for SLURM's commands: the job's number, or ``120_7`` for a task of a job array.

    Return None outside a job.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return environ["SLURM_JOB_ID"] if array is None else f"{array}_{read_number(environ, 'SLURM_ARRAY_TASK_ID')}"


def _tasks(environ: Mapping[str, str]) -> int:
    return read_number(environ, "SLURM_STEP_NUM_TASKS", default=read_number(environ, "SLURM_NTASKS", default=1))


def _counts(environ: Mapping[str, str]) -> list[int]:
    """Return a list with the number of tasks on each node of a SLURM job or step."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if text is not None:
        return tasks_per_node(text)
    nodes = read_number(environ, "SLURM_NNODES", default=1)
    return [read_number(environ, "SLURM_NTASKS_PER_NODE", default=_tasks(environ) // nodes)] * nodes
