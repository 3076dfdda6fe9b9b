"""The part of a tensor that is on this rank: of a DTensor its own shard, of weights that another rank holds nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in its memory; another tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def begins_of(tensor: Any) -> list[int]:
    """The first index, in each dimension, of this rank's part of a DTensor; of another tensor zeros."""
    if not hasattr(tensor, "placements"):
        return [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(begins)


def box_of(tensor: Tensor) -> tuple[slice, ...]:
    """The range of each dimension that this rank's part takes of the whole."""
    part = local_part(tensor.detach())
    return tuple(slice(begin, begin + size) for begin, size in zip(begins_of(tensor), part.shape, strict=True))


FSDP, DEEPSPEED, PIPELINE = "fsdp", "deepspeed", "balanced"
"""What has cut a module, by the strategies' names."""


def is_split(module: nn.Module) -> bool:
    """Whether torch's ``fully_shard``, or a plan of its tensor parallelism, has cut a module over the ranks."""
    by_torch = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return by_torch or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def is_partitioned(parameter: Tensor) -> bool:
    """Whether DeepSpeed has cut a parameter over the ranks."""
    return hasattr(parameter, "ds_id")


def is_freed(module: nn.Module) -> bool:
    """Whether a pipeline has let go of weights of this module, and has not brought them back."""
    return any(stands_in(parameter) for parameter in module.parameters())


def cut_by(module: nn.Module) -> str:
    """What has left a module in parts, by the marks of its parameters; "": it is whole."""
    if is_freed(module):
        return PIPELINE
    if is_split(module):
        return FSDP
    return DEEPSPEED if any(is_partitioned(parameter) for parameter in module.parameters()) else ""


def stands_in(parameter: Tensor) -> bool:
    """Whether a parameter has no values here, but on another rank of its pipeline."""
    if is_lazy(parameter):
        return False
    strided = parameter.layout is torch.strided and not parameter.is_meta
    return strided and parameter.numel() > 1 and not any(parameter.stride())
