"""Variables that lockstep reads and sets for ranks: the Trainer's flags, threads, CUDA's variables, a free port.

And what a process takes over from whoever started it: its rank, the seed, and its end with the parent.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import socket
import sys
import threading
from ast import literal_eval
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from lockstep.cluster.detect import early_rank
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import FORK_WORKERS
from lockstep.ground.rank import rank_zero_only
from lockstep.launch.attempts import TRIAL
from lockstep.launch.parent_death import PARENT, bind, end_with, prctl
from lockstep.supervise.status import hand_early, note_early

# -- flags of the Trainer ------------------------------------------------------------------------------------


def flags_of(
    given: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The flags that variables set and the script leaves at their defaults.

    Args:
        given: every flag as the script has it.
        defaults: every flag's default.
        environ: ``PL_TRAINER_`` and the flag in capitals; a value is read as Python writes it, or else is text.

    Example:
        >>> flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": "2"})
        {'devices': 2}
    """
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        value: Any = environ.get(f"PL_TRAINER_{name.upper()}", "")
        if value != "" and given[name] == default:
            with suppress(ValueError, SyntaxError):  # plain text, such as cpu
                value = literal_eval(value)
            found[name] = value
    return found


# -- what is in force ----------------------------------------------------------------------------------------


_NAMES = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCH_DISABLE_SHARE_RDZV_TCP_STORE
SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_JOB_GPUS SLURM_JOB_ID
SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_LOCALID SLURM_NNODES SLURM_NODEID SLURM_NODELIST
SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_PTY_PORT SLURM_RESTART_COUNT SLURM_STEPID SLURM_STEP_GPUS
SLURM_STEP_ID SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE
SLURM_TASKS_PER_NODE JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE
LSB_DJOB_RANKFILE LSB_HOSTS LSB_JOBID LSB_MCPU_HOSTS PBS_JOBID OMPI_MCA_ess_base_jobid PMIX_NAMESPACE
PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME LOGLEVEL OMP_NUM_THREADS
PYTORCH_NVML_BASED_CUDA_CHECK
"""
NAMES = frozenset(_NAMES.split())
FAMILIES = ("LOCKSTEP_", "PL_GLOBAL_SEED", "PL_TRAINER_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "NCCL_")
"""Variables that lockstep reads, by their names and by how their names begin; a test looks for others."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\w+://[^/\s]*@|(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9+/_=]{32,}")
HIDDEN = "(not shown)"


def in_force(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that are set and that lockstep reads, by name; of what looks like a secret the name alone.

    Example:
        >>> in_force({"OMP_NUM_THREADS": "2", "HOME": "/root", "PL_TRAINER_TOKEN": "abc"})
        {'OMP_NUM_THREADS': '2', 'PL_TRAINER_TOKEN': '(not shown)'}
    """
    found = {name: value for name, value in environ.items() if name in NAMES or name.startswith(FAMILIES)}
    return {
        name: HIDDEN if _SECRET.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(found.items())
    }


# -- threads -------------------------------------------------------------------------------------------------


def share_cores(environ: Mapping[str, str], local_size: int) -> None:
    """Let torch use no more threads than the cores of this node divided by its ranks.

    Ranks that each took all cores would spend their time waiting for one another. What somebody chose stays:
    ``OMP_NUM_THREADS``, or fewer threads by ``torch.set_num_threads``. Sums depend on the number of threads: runs
    are compared bit for bit with the same number in each process.

    Args:
        environ: the environment.
        local_size: ranks on this node.
    """
    if local_size > 1 and "OMP_NUM_THREADS" not in environ:
        import torch

        share = max(1, cores() // local_size)
        if torch.get_num_threads() > share:
            torch.set_num_threads(share)


def cores() -> int:
    """The cores that this process may use; a container or a scheduler may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- CUDA ----------------------------------------------------------------------------------------------------


BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
VARIABLE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def ask_nvml(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let ``torch.cuda.is_available()`` ask NVIDIA's library and not start CUDA, after which no process can be forked.

    Called when lockstep is imported; what the user has set stays.
    """
    environ.setdefault(BY_NVML, "1")


def number_devices(dealt_out: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let all ranks of this machine count its GPUs alike: by their places on the bus, as ``nvidia-smi`` does.

    What the user has set stays. On a cluster nothing is set: it says itself which devices a task has. A build of torch
    without CUDA needs neither. Where CUDA has begun to count before, by speed, that holds in this process: the others
    get the names of the GPUs in its order, so that two ranks do not take one card.

    Args:
        dealt_out: whether a cluster places the ranks; or no GPU is wanted.
        environ: the environment, which CUDA reads once, when it is used first.
    """
    import torch

    if dealt_out or torch.version.cuda is None:
        return
    if ORDER not in environ and cuda_has_begun():
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        if not any("MIG" in each.name for each in found):  # a slice of a GPU has a name of its own
            environ[VISIBLE] = ",".join(f"GPU-{each.uuid}" for each in found)
            return
    environ.setdefault(ORDER, "PCI_BUS_ID")
    count = torch.cuda.device_count() if VISIBLE not in environ else 0
    if count:
        environ[VISIBLE] = ",".join(map(str, range(count)))


def cuda_has_begun() -> bool:
    """Whether this process has started CUDA, by torch or otherwise; asking does not."""
    import torch

    if torch.cuda.is_initialized():
        return True
    try:  # the driver's library as it is loaded; one that nobody has loaded is left alone
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
    except (OSError, AttributeError):
        return False


_NOT_INITIALIZED = 3
"""What the driver answers before it is started (CUDA_ERROR_NOT_INITIALIZED)."""


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that processes started from here see, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in environ:
        return [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def fix_cublas_workspaces() -> None:
    """Let cuBLAS use workspaces of fixed sizes; it reads the variable when it is used first.

    A value that the user has set stays. Ranks that are started from here inherit it.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    """
    os.environ.setdefault(VARIABLE, WORKSPACES)


# -- a port --------------------------------------------------------------------------------------------------


class HeldPort:
    """A port of this machine that no other process is given as long as it is held; the ranks' store listens on it.

    It is bound, and nobody listens on it: Linux lets a second socket listen there that asks for SO_REUSEADDR, as a
    store's does, and gives the port to nobody who asks for any. Other systems refuse the second socket: there the port
    is free from the start, and another process may take it before the ranks meet.

    Attributes:
        number: of the port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]
        if not sys.platform.startswith("linux"):
            self.close()

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()


def free_port() -> int:
    """A port of this machine that nobody listens on right now; `HeldPort` keeps it so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- a trial of a search on this machine ----------------------------------------------------------------------


ROOT = "PL_TRAINER_DEFAULT_ROOT_DIR"
"""The variable that sets a Trainer's ``default_root_dir`` where the script leaves it out."""


def trial_environment(
    folder: str, at_a_time: int, devices: str | None, keeps: bool, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a trial's process, which ends with this one.

    Args:
        folder: of the trial.
        at_a_time: trials that run at a time, which share the cores.
        devices: GPUs that it sees; "" for none; None: as here.
        keeps: whether logs and checkpoints go into the folder where the script does not say otherwise.
        environ: of this process.
    """
    found = {**environ, TRIAL: folder, PARENT: str(os.getpid())}
    if at_a_time > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, cores() // at_a_time)))
    if devices is not None:
        found.setdefault(ORDER, "PCI_BUS_ID")
        found[VISIBLE] = devices
    if keeps:
        found.setdefault(ROOT, folder)
    return found


# -- Lightning's names ---------------------------------------------------------------------------------------


STANDS_IN = "LOCKSTEP_LIGHTNING"
"""The variable with the version of Lightning that lockstep stands in for, in processes that have its names."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""The folder on PYTHONPATH by which processes that are started from such a one have them, too, and a rank of
`lockstep run` tells what ends its script before lockstep is imported."""

STANDS_FOR = "2.6.6"
"""The version, where the variable does not say otherwise."""


def names_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that give Lightning's names to every Python process that inherits them.

    Args:
        environ: what they are put on top of.

    Example:
        >>> names_variables({"PYTHONPATH": "/mine"}) == {"LOCKSTEP_LIGHTNING": "2.6.6", "PYTHONPATH": f"{SITE}:/mine"}
        True
    """
    return {STANDS_IN: environ.get(STANDS_IN) or STANDS_FOR, **site_variable(environ)}


def site_variable(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """PYTHONPATH with `SITE` in front of it."""
    given = python_path(environ)
    others = [entry for entry in given.split(os.pathsep) if entry != SITE] if given else []
    return {"PYTHONPATH": os.pathsep.join([SITE, *others])}


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH as it is; "" without one."""
    return environ.get("PYTHONPATH", "")


def hand_down_names() -> tuple[str, Callable[[], None]]:
    """Give Lightning's names to the processes that are started from now on.

    Returns:
        the version that they stand for, and what takes it back.
    """
    before = {name: os.environ.get(name) for name in (STANDS_IN, "PYTHONPATH")}
    os.environ.update(names_variables())

    def take_back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return os.environ[STANDS_IN], take_back


# -- what a process takes over --------------------------------------------------------------------------------


SEED = "PL_GLOBAL_SEED"
"""The variable with the seed, by the name that Lightning gave it."""


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return None


started_in = _working_folder()
"""The working folder when lockstep was imported: where a script is started once more."""


def inherit(environ: Mapping[str, str] = os.environ) -> None:
    """Take over rank and seed, and end with the parent.

    Called when `lockstep` is imported, so that `rank_zero_only` and a bare ``seed_everything()`` are right
    in the lines of a script that come before its Trainer.
    """
    rank_zero_only.rank = early_rank(environ)
    if environ.get(SEED):
        from lockstep.ground.seed import hand_down_seed

        try:
            hand_down_seed(int(environ[SEED]))
        except ValueError:
            raise MisconfigurationException(
                f"the environment variable {SEED} is {environ[SEED]!r}: it is the seed that seed_everything() takes, "
                "an integer from 0 to 4294967295; set it to one, or remove it"
            ) from None
    hand_early(environ)
    if PARENT in environ:
        end_with(int(environ[PARENT]))
        if environ[PARENT] == str(os.getppid()):
            note_early(environ)


def bind_loader_workers() -> None:
    """Have the system kill loader workers that are forked here when this process ends, however it does.

    By themselves they look for their parent every 5 seconds. Those that are not forked do so still.
    """
    found = prctl()
    if found is not None:
        from torch.utils.data import dataloader

        bound = functools.partial(_bind_loader_worker, found, dataloader.__file__)
        FORK_WORKERS.at_fork(after_in_child=bound)


def _bind_loader_worker(found: Callable[..., int], loader: str) -> None:
    frame, made = sys._getframe(), threading.main_thread() is threading.current_thread()
    while made and frame is not None:  # what counts is the end of a thread, so the loader's must be the main one
        if frame.f_code.co_filename == loader:
            bind(found)
            return
        frame = frame.f_back  # type: ignore[assignment]
