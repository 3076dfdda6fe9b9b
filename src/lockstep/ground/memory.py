"""Let go of memory, and recognise that there is not enough of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.tree import tree_map

_SAYINGS = (
    "DefaultCPUAllocator",  # the host's memory
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers where its workspace does not fit
)
"""What errors say that come as plain RuntimeErrors where memory is used up."""


def recursive_detach(in_dict: object, to_cpu: bool = False) -> Any:
    """A copy of a nested collection with its tensors detached from their graphs.

    Args:
        in_dict: a dict, or anything that `lockstep.ground.tree.tree_map` goes through.
        to_cpu: also bring them to the CPU.
    """
    return tree_map(lambda t: t.detach().cpu() if to_cpu else t.detach(), in_dict, Tensor)


def is_oom_error(exception: BaseException) -> bool:
    """Whether an exception says that a device's memory, or the host's, is used up."""
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(saying in str(exception) for saying in _SAYINGS)
    )


def garbage_collection_cuda() -> None:
    """Collect Python's garbage and give the cached memory of CUDA devices back to them."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
