"""The part of a tensor that is on this rank: of a DTensor its own shard, of weights that another rank holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement, Shard


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in its memory; another tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def box_of(tensor: Tensor) -> tuple[slice, ...]:
    """The range of each dimension that this rank's part takes of the whole; of another tensor all."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return tuple(slice(0, size) for size in tensor.shape)
    return box_in(tensor.shape, mesh, placements)


def box_in(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """The range of each dimension that this rank's part of a DTensor would take.

    torch's ``compute_local_shape_and_global_offset`` knows this, too. It is wrong for sizes that tensor parallelism and
    then ``fully_shard`` cut unevenly: of 50,257 rows on a mesh of 4 x 2 two ranks would have the same one.

    Args:
        shape: of the whole.
        mesh: over which it is cut; a rank that is no part of it has nothing.
        placements: one for each dimension of the mesh.
    """
    place = mesh.get_coordinate()
    if place is None:
        return tuple(slice(0, 0) for _ in shape)
    box = [slice(0, size) for size in shape]
    for axis in _in_order_of_cuts(placements):
        dim = cast("Shard", placements[axis]).dim
        box[dim] = _chunk(box[dim], mesh.size(axis), place[axis])
    return tuple(box)


def begins_of(tensor: Tensor) -> list[int]:
    """The first index, in each dimension, of this rank's part of a DTensor; of another tensor zeros."""
    return [each.start for each in box_of(tensor)]


def is_cut_again(tensor: Tensor) -> bool:
    """Whether ``fully_shard`` has cut a dimension of a DTensor that tensor parallelism had cut before."""
    return any(hasattr(placement, "split_factor") for placement in getattr(tensor, "placements", ()))


def _in_order_of_cuts(placements: Sequence[Placement]) -> list[int]:
    """The dimensions of a mesh that cut a tensor, in the order in which they did.

    That is from left to right, but for those that have cut again what dimensions on their right had cut.
    """
    cut = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    again = [axis for axis in cut if hasattr(placements[axis], "split_factor")]
    return [axis for axis in cut if axis not in again] + again[::-1]


def _chunk(whole: slice, chunks: int, number: int) -> slice:
    """One chunk of a range, as `torch.chunk` cuts it: the last ones are smaller, or empty."""
    step = -(-(whole.stop - whole.start) // chunks)
    begin = min(whole.start + number * step, whole.stop)
    return slice(begin, min(begin + step, whole.stop))


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
