"""Memory of the CPU for copies from a device: pinned, which is handed out in powers of two, so cut from blocks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lockstep.ground.device import synchronize
from lockstep.ground.moving import has_pinned_memory

BLOCK = 2**26
"""Bytes of a block; a larger tensor has the next power of two, whose rest is for others."""
ALIGNMENT = 512


class HostMemory:
    """Tensors on the CPU, each with a storage of its own, that are cut from a few blocks.

    A block is free again when neither this object nor one of its tensors is there any more.

    Args:
        device: from which copies come; its kind decides whether memory is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = has_pinned_memory(device.type)
        self._open: list[tuple[Tensor, int]] = []  # blocks, and where what is left of each begins
        self._total = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Memory for a copy of ``tensor``, with its shape, strides and dtype."""
        shape, strides = tensor.shape, torch.empty_like(tensor, device="meta").stride()
        size = tensor.numel() * tensor.element_size()
        if not self._pinned or not size:
            return torch.empty_like(tensor, device="cpu")
        place = next((n for n, (block, start) in enumerate(self._open) if start + size <= block.numel()), None)
        if place is None:
            place = len(self._open)
            # as large as others together are by a part, so that what is left at their ends is little
            length = max(BLOCK, power_of_two(size), power_of_two(self._total // 4))
            self._open.append((_pinned(length), 0))
            self._total += length
        block, start = self._open[place]
        # a storage of its own: who saves or copies a tensor with its storage has no more than that
        piece = (ctypes.c_char * size).from_address(block.data_ptr() + start)
        piece.block = block  # type: ignore[attr-defined]  # lives as long
        self._open[place] = block, start + -(-size // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(piece, dtype=tensor.dtype).as_strided(shape, strides)


class ReusedCopies:
    """Copies of storages of a device on the CPU, in pinned memory that is used again when no tensor is there any more.

    On the CPU, and for devices without pinned memory, copies are new each time.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.UntypedStorage]] = {}  # by their bytes
        self._memory: dict[torch.device, HostMemory] = {}

    def of(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy, which is there after :meth:`arrive`; let a tensor lie in it before the next is asked for."""
        size, device = source.nbytes(), source.device
        if not size or not has_pinned_memory(device.type):
            return source.clone() if device.type == "cpu" else source.cpu()
        kept = self._kept.setdefault(size, [])
        free = next((one for one in kept if torch._C._storage_Use_Count(one._cdata) == 1), None)
        if free is None:
            memory = self._memory.setdefault(device, HostMemory(device))
            free = memory.like(torch.empty(size, dtype=torch.uint8, device="meta")).untyped_storage()
            kept.append(free)
        free.copy_(source, non_blocking=True)
        return free

    def arrive(self) -> None:
        """Wait until all copies are there."""
        for device in self._memory:
            synchronize(device)


def power_of_two(number: int) -> int:
    """The first one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _pinned(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)
