"""Process groups of the parts: of one rank in this process, of ranks that a pool has started, and their backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.devices import module_of


def backend_of(device: str) -> str:
    """What carries messages: the device's own backend, NCCL for NVIDIA's, and gloo for tensors of the CPU."""
    own = dist.Backend.default_device_backend_map.get(device, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{device}:{own}"


def join(device: str) -> None:
    """Make the group of the ranks that a launcher or a pool has started, each with a device of its own."""
    number = int(os.environ["LOCAL_RANK"])
    module = module_of(device)
    if module is not None:
        module.set_device(number)
    where = torch.device(device, number) if device == "cuda" else None
    dist.init_process_group(backend_of(device), device_id=where)


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
