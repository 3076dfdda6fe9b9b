"""Environment variables that lockstep reads, or sets for ranks. They concern flags, threads, devices and names.

A started process also inherits its rank and the seed, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import threading
from ast import literal_eval
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from types import FrameType
from typing import Any

from lockstep.cluster.detect import early_rank
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import FORK_WORKERS
from lockstep.ground.rank import rank_zero_only
from lockstep.launch.attempts import TRIAL
from lockstep.launch.parent_death import PARENT, bind, end_with, prctl
from lockstep.supervise.status import pass_early_errors, watch_early_errors

# -- flags of the Trainer ------------------------------------------------------------------------------------


def flags_of(
    given: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the Trainer flags in ``PL_TRAINER_`` variables, except for flags that the script sets itself.

    Args:
        given: every flag as the script sets it.
        defaults: every flag's default.
        environ: the environment. Variables are ``PL_TRAINER_`` and the flag in capitals. A value is parsed as a Python
            literal, or else is text.

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


# -- variables that are set ----------------------------------------------------------------------------------


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
MKL_NUM_THREADS NVIDIA_TF32_OVERRIDE PYTORCH_NVML_BASED_CUDA_CHECK
"""
NAMES = frozenset(_NAMES.split())
FAMILIES = ("LOCKSTEP_", "PL_GLOBAL_SEED", "PL_TRAINER_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "NCCL_")
"""Variables that lockstep reads, by name and by prefix. A test checks that there are no others."""

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\w+://[^/\s]*@|(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9+/_=]{32,}")
HIDDEN = "(not shown)"


def variables_in_use(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that are set and that lockstep reads.

    Values that look like secrets are hidden.

    Example:
        >>> variables_in_use({"OMP_NUM_THREADS": "2", "HOME": "/root", "PL_TRAINER_TOKEN": "abc"})
        {'OMP_NUM_THREADS': '2', 'PL_TRAINER_TOKEN': '(not shown)'}
    """
    found = {name: value for name, value in environ.items() if name in NAMES or name.startswith(FAMILIES)}
    return {
        name: HIDDEN if SECRET.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(found.items())
    }


# -- threads -------------------------------------------------------------------------------------------------


def share_cores(environ: Mapping[str, str], local_size: int) -> None:
    """Limit the number of torch's threads in this rank to its share of the node's cores.

    If each rank used all cores, the ranks would mostly wait for each other. The user's choice takes precedence, by
    ``OMP_NUM_THREADS`` or by fewer threads in ``torch.set_num_threads``. Sums depend on the number of threads, so a
    bitwise comparison of two runs needs equal numbers of threads.

    Args:
        environ: the environment.
        local_size: number of ranks on this node.
    """
    if local_size > 1 and "OMP_NUM_THREADS" not in environ:
        import torch

        share = max(1, cores() // local_size)
        if torch.get_num_threads() > share:
            torch.set_num_threads(share)


def cores() -> int:
    """Return the number of cores that this process may use, within the limits of a container or a scheduler."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- CUDA ----------------------------------------------------------------------------------------------------


BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
VARIABLE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def ask_nvml(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let ``torch.cuda.is_available()`` query NVML instead of starting CUDA, so that this process can be forked.

    Called when lockstep is imported. A value set by the user is kept.
    """
    environ.setdefault(BY_NVML, "1")


def number_devices(is_assigned: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make all ranks on this machine number the GPUs by PCI bus, like ``nvidia-smi``.

    A value set by the user is kept. On a cluster nothing is set, because the cluster assigns devices to tasks itself.
    If CUDA has already numbered the GPUs by speed in this process, the other ranks get the GPUs' names in that order,
    so that two ranks do not use the same GPU.

    Args:
        is_assigned: whether a cluster assigns the devices, or no GPU is used.
        environ: the environment. CUDA reads it once, on first use.
    """
    import torch

    if is_assigned or torch.version.cuda is None:
        return
    if ORDER not in environ and has_cuda_started():
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        # a slice of a GPU has a name of its own
        if not any("MIG" in each.name for each in found):
            environ[VISIBLE] = ",".join(f"GPU-{each.uuid}" for each in found)
            return
    environ.setdefault(ORDER, "PCI_BUS_ID")
    count = torch.cuda.device_count() if VISIBLE not in environ else 0
    if count:
        environ[VISIBLE] = ",".join(map(str, range(count)))


def has_cuda_started() -> bool:
    """Return True if torch or another library has started CUDA in this process. The check does not start CUDA."""
    import torch

    if torch.cuda.is_initialized():
        return True
    try:  # the driver library only if it is already loaded
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
    except (OSError, AttributeError):
        return False


_NOT_INITIALIZED = 3
"""Error code of the CUDA driver before its initialization (CUDA_ERROR_NOT_INITIALIZED)."""


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that child processes see, as numbers or names for CUDA_VISIBLE_DEVICES."""
    if VISIBLE in environ:
        return [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def fix_cublas_workspaces() -> None:
    """Make cuBLAS deterministic by giving its workspaces fixed sizes. Call it before cuBLAS is used.

    A value set by the user is kept. Ranks started from here inherit the variable.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    """
    os.environ.setdefault(VARIABLE, WORKSPACES)


# -- ports ---------------------------------------------------------------------------------------------------


class ReservedPort:
    """Reservation of a port of this machine, until the ranks' store listens on the port.

    The port is bound without a listener. On Linux, a second socket with SO_REUSEADDR, such as the store's, can still
    listen on the port, and the system gives the port to no process that requests a free one. Other systems refuse the
    second socket. There the port is not reserved, and another process may take it before the rendezvous.

    Attributes:
        number: number of the port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]
        if not sys.platform.startswith("linux"):
            self.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def free_port() -> int:
    """Return a port of this machine that is free now, but not reserved (see `ReservedPort`)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- trials of a search on this machine -----------------------------------------------------------------------


ROOT = "PL_TRAINER_DEFAULT_ROOT_DIR"
"""Environment variable with the default for a Trainer's ``default_root_dir``."""


def trial_environment(
    folder: str, at_a_time: int, devices: str | None, keeps: bool, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables for a new process that runs a search trial.

    The process will end when this process ends.

    Args:
        folder: folder of the trial.
        at_a_time: number of simultaneous trials, which share the cores.
        devices: GPUs that the trial sees; "": none; None: the same GPUs as this process.
        keeps: whether the folder is the default for logs and checkpoints.
        environ: environment of this process.
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
"""Environment variable with the version of Lightning that lockstep reports under Lightning's import names."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""Folder on PYTHONPATH that gives child processes Lightning's import names.

It also lets a rank of `lockstep run` report an error of its script before lockstep is imported.
"""

STANDS_FOR = "2.6.6"
"""Default version of Lightning for `STANDS_IN`."""


def names_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables that let Python processes import lockstep under Lightning's names.

    Args:
        environ: the environment to extend.

    Example:
        >>> names_variables({"PYTHONPATH": "/mine"}) == {"LOCKSTEP_LIGHTNING": "2.6.6", "PYTHONPATH": f"{SITE}:/mine"}
        True
    """
    return {STANDS_IN: environ.get(STANDS_IN) or STANDS_FOR, **site_variable(environ)}


def site_variable(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a PYTHONPATH variable that starts with the folder `SITE` and continues with the current entries."""
    given = python_path(environ)
    others = [entry for entry in given.split(os.pathsep) if entry != SITE] if given else []
    return {"PYTHONPATH": os.pathsep.join([SITE, *others])}


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PYTHONPATH; "" if it is not set."""
    return environ.get("PYTHONPATH", "")


def hand_down_names() -> tuple[str, Callable[[], None]]:
    """Set environment variables, so that processes started later can import lockstep as Lightning.

    Returns:
        the version of Lightning, and a function that restores the environment.
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


# -- inheritance of a process ---------------------------------------------------------------------------------


SEED = "PL_GLOBAL_SEED"
"""Environment variable with the seed. Lightning uses the same name."""


try:
    started_in: str | None = os.getcwd()
except OSError:  # the folder was removed
    started_in = None
"""Working folder when lockstep was imported. The script is restarted there."""


def inherit(environ: Mapping[str, str] = os.environ) -> None:
    """Read this process' rank and seed from the environment. If it names a parent process, end when the parent ends.

    Called when `lockstep` is imported, so that `rank_zero_only` and a bare ``seed_everything()`` work in the lines of a
    script before its Trainer.
    """
    rank_zero_only.rank = early_rank(environ)
    if environ.get(SEED):
        from lockstep.ground.seed import hand_down_seed

        try:
            hand_down_seed(int(environ[SEED]))
        except ValueError:
            raise MisconfigurationException(
                f"the environment variable {SEED} is {environ[SEED]!r}: set it to the seed for seed_everything(), an "
                "integer from 0 to 4294967295, or remove it"
            ) from None
    pass_early_errors(environ)
    if PARENT in environ:
        end_with(int(environ[PARENT]))
        if environ[PARENT] == str(os.getppid()):
            watch_early_errors(environ)


def bind_loader_workers() -> None:
    """Let the system kill this process' forked loader workers as soon as this process ends.

    Torch's workers check for their parent every 5 seconds. Workers that are not forked still rely on these checks.
    """
    found = prctl()
    if found is not None:
        from torch.utils.data import dataloader

        def bind_worker() -> None:
            # the system ends a worker with the thread that forked it, so bind it to the main thread only
            frame: FrameType | None = sys._getframe()
            while frame is not None and threading.main_thread() is threading.current_thread():
                if frame.f_code.co_filename == dataloader.__file__:
                    bind(found)
                    return
                frame = frame.f_back

        FORK_WORKERS.at_fork(after_in_child=bind_worker)
