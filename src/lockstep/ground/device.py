"""Which devices a run uses, and how a batch gets there."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch

from lockstep.ground.accelerator import Accelerator, Devices, find_accelerator
from lockstep.ground.tree import tree_map


class _Movable(metaclass=ABCMeta):  # noqa: B024, a class by which `isinstance` asks for a method
    """Anything with a method ``to``: tensors, packed sequences, a user's own batch class."""

    @classmethod
    def __subclasshook__(cls, subclass: Any) -> Any:
        return True if callable(getattr(subclass, "to", None)) else NotImplemented


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
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


def resolve_accelerator(
    accelerator: str | Accelerator = "auto", devices: Devices = "auto"
) -> tuple[str, list[torch.device]]:
    """The device type and this node's devices, one for each rank.

    Args:
        accelerator: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"gpu"``, ``"cuda"``, or an Accelerator.
        devices: how many (``2``, ``"2"``), which (``[0, 2]``, ``"0,2"``), all (``-1``, ``"-1"``), or
            ``"auto"``, which is all GPUs. On the CPU the number of processes; ``"auto"`` is one.

    Returns:
        ``("cuda", [cuda:0, cuda:2])``, ``("cpu", [cpu, cpu])``.

    Raises:
        MisconfigurationException: an unknown accelerator, devices that are not there.

    Example:
        >>> resolve_accelerator("cpu", 2)
        ('cpu', [device(type='cpu'), device(type='cpu')])
    """
    found = find_accelerator(accelerator)
    return found.device_type, found.get_parallel_devices(devices)
