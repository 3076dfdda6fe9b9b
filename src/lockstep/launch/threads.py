"""The share of the processor's cores that each rank of a node computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


def share_cores(environ: Mapping[str, str], local_size: int) -> None:
    """Let torch use the cores of this node divided by its ranks, unless ``OMP_NUM_THREADS`` says otherwise.

    Ranks that each took all cores would spend their time waiting for one another.
    """
    if local_size > 1 and "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(max(1, _cores() // local_size))


def _cores() -> int:
    # a container or a scheduler may allow fewer cores than the machine has
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
