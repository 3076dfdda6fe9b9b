"""Copies of batches on another device, and tensors without their graphs."""

from __future__ import annotations

from abc import ABCMeta
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
