"""A copy of a checkpoint that the run, going on, cannot change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint, its tensors to the CPU.

    What shares memory in the checkpoint shares it in the copy (tied weights, views), so that files get no larger.
    Tensors inside of objects of other classes stay on their devices.
    """
    copies: dict[int, Any] = {}
    _copy_tensors(checkpoint, copies)
    return copy.deepcopy(checkpoint, copies)


def _copy_tensors(checkpoint: Any, copies: dict[int, Any]) -> None:
    """Put a copy of each tensor in dicts, lists and tuples where ``deepcopy`` looks for what it has copied."""
    storages: dict[int, torch.UntypedStorage] = {}
    waiting, seen = [checkpoint], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if id(value) not in copies:
                if _is_plain(value):
                    copies[id(value)] = _copied(value, storages)
                elif not value.is_leaf:  # which deepcopy refuses
                    copies[id(value)] = copy.deepcopy(value.detach())
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a view of bytes."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _copied(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    source = tensor.untyped_storage()
    if source._cdata not in storages:
        # to the CPU: a second copy of model and optimizer may be more than a GPU holds
        storages[source._cdata] = source.clone() if source.device.type == "cpu" else source.cpu()
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
