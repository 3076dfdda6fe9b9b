"""The share of the processor's cores that each rank of a node computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


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
