"""Functions that search tensors for NaN and Inf, and that convert values to Python's numbers.

Values on a device are converted by one copy, because each copy waits for all queued work of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lockstep.ground import comm
from lockstep.ground.device import widest
from lockstep.ground.parameters import is_placeholder, partition_values

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


Parts = list[tuple[str, Tensor]]
"""This rank's shards of floating-point tensors, by name."""


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors whose shards on this rank contain NaN or Inf.

    Waits for the device once, and again only if something is found.
    """
    parts = parts_with_values(tensors)
    # A single norm of all values needs only one wait for the device.
    norm = total_norm(parts)
    return [] if norm is None or bool(norm.isfinite()) else names_not_finite(parts)


def parts_with_values(tensors: Iterable[tuple[str, Tensor]]) -> Parts:
    """Return (name, shard of this rank) for each tensor whose shard can be searched for NaN.

    A shard cannot be searched if it is empty, or has a dtype or layout that torch cannot search.
    """
    return [(name, part) for name, tensor in tensors if (part := _values_of(tensor)) is not None]


def total_norm(parts: Parts) -> Tensor | None:
    """Return the 2-norm over all elements of the shards in ``parts``; None if ``parts`` is empty.

    The norm is not finite if an element is not finite, or if it overflows.
    """
    return torch.nn.utils.get_total_norm([part for _, part in parts]) if parts else None


def names_not_finite(parts: Parts) -> list[str]:
    """Return the names of the shards in ``parts`` that contain NaN or Inf. Waits for the device once per shard."""
    return [name for name, part in parts if not bool(part.isfinite().all())]


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return this rank's shard of a tensor. Return None if it is empty, or cannot be searched for NaN."""
    if is_lazy(tensor) or is_placeholder(tensor):
        return None
    tensor = partition_values(tensor, comm.rank()) if hasattr(tensor, "ds_tensor") else tensor.detach()
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = type(part) is Tensor and part.layout is torch.strided and not part.is_meta
    return part if plain and part.dtype in _FLOATS and part.numel() else None


def floats(values: Sequence[Any]) -> list[float]:
    """Convert numbers and one-element tensors to a list of floats. Collective if there are DTensors."""
    # One copy for all values: each copy waits for all queued work of the device.
    far = [_plain(value.detach()).reshape(()) for value in values if _is_far(value)]
    if len({value.device for value in far}) != 1:
        return [float(value) for value in values]
    dtype = widest(far[0].device)
    found = iter(torch.stack([value.to(dtype) for value in far]).tolist())
    return [next(found) if _is_far(value) else float(value) for value in values]


def _plain(tensor: Tensor) -> Tensor:
    """Gather a DTensor, which cannot be stacked with plain tensors, nor converted to a list."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _is_far(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def whole_number(value: object) -> int | None:
    """Convert an integer, or a float without a fraction such as 1e3, to an int. Return None for other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return index(value)  # type: ignore[arg-type]  # an int, or one of NumPy's
    except TypeError:
        return None
