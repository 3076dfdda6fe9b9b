"""CUDA's variables, set before it reads them: for the numbers of devices, and for products that are deterministic."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

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
