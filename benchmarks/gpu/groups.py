"""Process groups of the parts: of one rank in this process, and what carries messages on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


def backend_of(device: str) -> str:
    """What carries messages: NCCL between NVIDIA's devices and gloo between hosts."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


@contextlib.contextmanager
def one_rank_group(device: str, backend: str | None = None) -> Iterator[None]:
    """Inside, this process is the only rank of the default group."""
    where = torch.device(device, 0) if device == "cuda" else None
    backend = backend or backend_of(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=where)
    try:
        yield
    finally:
        dist.destroy_process_group()
