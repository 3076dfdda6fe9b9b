"""Functions that move data between host and devices, through pinned memory where possible.

Copies from a device go to pinned memory of the CPU (`HostMemory`). Pinned memory is allocated in powers of two, so
tensors are allocated from larger blocks.
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
    """Return True if host memory can be pinned for a kind of device, which makes asynchronous copies possible."""
    if kind in ("cpu", "meta", "mps"):  # mps: its copies race with the host (pytorch issue 83015)
        return False
    if kind in ("cuda", "xpu"):  # known: the check below would initialize the device
        return True
    try:
        return bool(torch.empty(1).pin_memory().is_pinned())
    except RuntimeError:
        return False


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to pinned memory for asynchronous reads by ``device``. Return it unchanged if unsupported."""
    return tensor.pin_memory() if has_pinned_memory(device.type) else tensor


def move_data_to_device(batch: object, device: torch.device | str | int) -> Any:
    """Return a copy of ``batch`` in which every object with a method ``to(device)`` is on ``device``.

    Handles nested collections and dataclasses as `tree_map` does. Copies to CUDA do not block the host if the source is
    in pinned memory.

    Args:
        batch: tensors, nested collections of them, objects with ``to``.
        device: the target.

    Returns:
        a batch of the same structure; tensors that are already on the device are not copied.

    Example::

        batch = move_data_to_device({"images": images, "labels": labels}, "cuda:0")
    """
    device = torch.device(device)
    # cpu: the copy would return before the data is there; mps: it races with the host (pytorch issue 83015)
    non_blocking = device.type not in ("cpu", "mps")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        moved = leaf.to(device)
        return leaf if moved is None else moved  # a `to` that works in place may not return itself

    return tree_map(move, batch, (torch.Tensor, _Movable))  # tensors first: the faster check


def recursive_detach(in_dict: object, to_cpu: bool = False) -> Any:
    """Return a copy of a nested collection in which the tensors are detached from their graphs.

    Args:
        in_dict: a dict, or any value that `lockstep.ground.tree.tree_map` handles.
        to_cpu: also move the tensors to the CPU.
    """
    return tree_map(lambda t: t.detach().cpu() if to_cpu else t.detach(), in_dict, Tensor)


class _Movable(metaclass=ABCMeta):  # noqa: B024, a class by which `isinstance` checks for a method
    """Marker type for objects with a method ``to``, such as tensors, packed sequences and users' batch classes."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return True if callable(getattr(subclass, "to", None)) else NotImplemented


BLOCK = 2**26
"""Size of a block in bytes. A larger tensor gets a block of the next power of two, whose rest other tensors use."""
ALIGNMENT = 512


class HostMemory:
    """Allocator of CPU tensors in a few large blocks. Each tensor has a storage of its own.

    A block is freed when this object and all tensors in the block are freed.

    Args:
        device: source of the copies; its kind decides whether memory is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = has_pinned_memory(device.type)
        self._open: list[tuple[Tensor, int]] = []  # blocks, and where the free rest of each starts
        self._total = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized CPU tensor with the shape, strides and dtype of ``tensor``."""
        shape, strides = tensor.shape, torch.empty_like(tensor, device="meta").stride()
        size = tensor.numel() * tensor.element_size()
        if not self._pinned or not size:
            return torch.empty_like(tensor, device="cpu")
        place = next((n for n, (block, start) in enumerate(self._open) if start + size <= block.numel()), None)
        if place is None:
            place = len(self._open)
            # in proportion to the other blocks, so that the unused ends are a small part
            length = max(BLOCK, power_of_two(size), power_of_two(self._total // 4))
            self._open.append((_pinned(length), 0))
            self._total += length
        block, start = self._open[place]
        # a storage of its own: saving or copying a tensor with its storage takes no more than this
        piece = (ctypes.c_char * size).from_address(block.data_ptr() + start)
        piece.block = block  # type: ignore[attr-defined]  # keeps the block alive
        self._open[place] = block, start + -(-size // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(piece, dtype=tensor.dtype).as_strided(shape, strides)


class ReusedCopies:
    """Copier of device storages to pinned CPU memory. The memory of a copy is reused after its tensors are freed.

    On the CPU, and for devices without pinned memory, each copy allocates new memory.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.UntypedStorage]] = {}  # by size in bytes
        self._memory: dict[torch.device, HostMemory] = {}

    def of(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Start to copy a storage to the CPU, and return the copy. Its values are complete after :meth:`arrive`.

        Create a tensor in the copy before the next call, which could otherwise use its memory again.
        """
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
        """Wait until the copies that :meth:`of` has started are complete."""
        for device in self._memory:
            synchronize(device)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _pinned(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)
