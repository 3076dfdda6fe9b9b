"""Variables that lockstep reads and sets for ranks: the Trainer's flags, threads, CUDA's variables, a free port."""

from __future__ import annotations

import os
import socket
from ast import literal_eval
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch

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
        share = max(1, cores() // local_size)
        if torch.get_num_threads() > share:
            torch.set_num_threads(share)


def cores() -> int:
    """The cores that this process may use; a container or a scheduler may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- CUDA ----------------------------------------------------------------------------------------------------


ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
VARIABLE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def number_devices(dealt_out: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let all ranks of this machine count its GPUs alike: by their places on the bus, as ``nvidia-smi`` does.

    What the user has set stays. On a cluster nothing is set: it says itself which devices a task has. A build of torch
    without CUDA needs neither.

    Args:
        dealt_out: whether a cluster places the ranks; or no GPU is wanted.
        environ: the environment; called before CUDA is used, which reads it once.
    """
    if dealt_out or torch.version.cuda is None:
        return
    environ.setdefault(ORDER, "PCI_BUS_ID")
    count = torch.cuda.device_count() if VISIBLE not in environ else 0
    if count:
        environ[VISIBLE] = ",".join(map(str, range(count)))


def fix_cublas_workspaces() -> None:
    """Let cuBLAS use workspaces of fixed sizes; it reads the variable when it is used first.

    A value that the user has set stays. Ranks that are started from here inherit it.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    """
    os.environ.setdefault(VARIABLE, WORKSPACES)


# -- a port --------------------------------------------------------------------------------------------------


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now.

    Args:
        address: of an interface of this machine.
    """
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
