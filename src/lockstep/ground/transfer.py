"""Transfers between the host and devices: batches on another device, tensors without their graphs, pinned memory.

Copies from a device go to memory of the CPU that is pinned (`HostMemory`). That is handed out in powers of two, so it
is cut from blocks.
"""

from __future__ import annotations

import ctypes
from abc import ABCMeta
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.device import synchronize
from lockstep.ground.tree import tree_map


@cache
def has_pinned_memory(kind: str) -> bool:
    """Whether the host's memory can be pinned for a kind of device, which then reads it while the host goes on."""
    if kind in ("cpu", "meta", "mps"):  # mps: its copies race with the host (pytorch issue 83015)
        return False
    if kind in ("cuda", "xpu"):  # known, so that nothing is started in a process that only asks
        return True
    try:
        return bool(torch.empty(1).pin_memory().is_pinned())
    except RuntimeError:
        return False


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU in memory that ``device`` reads while the host goes on, where there is such memory."""
    return tensor.pin_memory() if has_pinned_memory(device.type) else tensor


def move_data_to_device(batch: object, device: torch.device | str | int) -> Any:
    """A copy of ``batch`` with everything that has a method ``to(device)`` on ``device``.

    Goes through nested collections and dataclasses as `tree_map` does. Copies to CUDA do not block the host
    where the source lies in pinned memory.

    Args:
        batch: tensors, nested collections of them, objects with ``to``.
        device: where to.
    """
    device = torch.device(device)
    # cpu: the copy would return before the data is there; mps: it races with the host (pytorch issue 83015)
    non_blocking = device.type not in ("cpu", "mps")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        moved = leaf.to(device)
        return leaf if moved is None else moved  # a `to` that works in place may forget to return itself

    return tree_map(move, batch, (torch.Tensor, _Movable))  # tensors first: the quicker question


def recursive_detach(in_dict: object, to_cpu: bool = False) -> Any:
    """A copy of a nested collection with its tensors detached from their graphs.

    Args:
        in_dict: a dict, or anything that `lockstep.ground.tree.tree_map` goes through.
        to_cpu: also bring them to the CPU.
    """
    return tree_map(lambda t: t.detach().cpu() if to_cpu else t.detach(), in_dict, Tensor)


class _Movable(metaclass=ABCMeta):  # noqa: B024, a class by which `isinstance` asks for a method
    """Anything with a method ``to``: tensors, packed sequences, a user's own batch class."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return True if callable(getattr(subclass, "to", None)) else NotImplemented


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
