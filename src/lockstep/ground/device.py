"""Which devices a run uses, and how a batch gets there."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.tree import tree_map

Devices = int | str | list[int] | tuple[int, ...]


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


def resolve_accelerator(accelerator: str = "auto", devices: Devices = "auto") -> tuple[str, list[torch.device]]:
    """The device type and this node's devices, one for each rank.

    Args:
        accelerator: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"gpu"``, ``"cuda"`` or ``"mps"``.
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
    kind = _device_type(accelerator)
    if kind == "cpu":
        return kind, [torch.device("cpu")] * _process_count(devices)
    present = torch.cuda.device_count() if kind == "cuda" else 1
    return kind, [torch.device(kind, index) for index in _indices(devices, present, kind)]


def _device_type(accelerator: str) -> str:
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if accelerator == "auto":
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    if accelerator == "gpu" and (has_cuda or has_mps):
        return "cuda" if has_cuda else "mps"
    if accelerator == "cpu" or (accelerator == "cuda" and has_cuda) or (accelerator == "mps" and has_mps):
        return accelerator
    if accelerator in ("gpu", "cuda", "mps"):
        raise MisconfigurationException(
            f"accelerator={accelerator!r}, but torch {torch.__version__} finds no such device here: "
            "use accelerator='auto' or 'cpu', or install a build of torch for your GPU"
        )
    raise MisconfigurationException(
        f"accelerator={accelerator!r} is not known: use 'auto', 'cpu', 'gpu', 'cuda' or 'mps'"
    )


def _process_count(devices: Devices) -> int:
    count = 1 if devices == "auto" else _number(devices)
    if count is None or count < 1:
        raise MisconfigurationException(
            f"devices={devices!r} with accelerator='cpu': give the number of processes, 1 or more, or 'auto'"
        )
    return count


def _indices(devices: Devices, present: int, kind: str) -> list[int]:
    """Which of the devices 0 .. present - 1 were asked for."""
    count = -1 if devices == "auto" else _number(devices)
    if count is not None:
        indices = list(range(present if count == -1 else count))
    elif isinstance(devices, str):
        try:
            indices = [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            indices = []
    else:
        indices = list(devices) if isinstance(devices, list | tuple) else []
    if not indices or any(type(index) is not int or index < 0 for index in indices):
        raise MisconfigurationException(
            f"devices={devices!r}: give a number, a list such as [0, 2], a string such as '0,2', -1 for all, or 'auto'"
        )
    if len(set(indices)) < len(indices):
        raise MisconfigurationException(f"devices={devices!r} names a device twice: give each one once")
    if max(indices) >= present:
        raise MisconfigurationException(
            f"devices={devices!r}, but this machine has {present} {kind} device(s), numbered from 0: "
            f"use devices={present} or less, or -1 for all"
        )
    return indices


def _number(devices: Devices) -> int | None:
    """The count that ``2`` or ``"2"`` stands for; None for lists, ``"0,2"`` and everything else."""
    if isinstance(devices, bool):
        return None
    if isinstance(devices, str):
        try:
            return int(devices)
        except ValueError:
            return None
    return devices if isinstance(devices, int) else None
