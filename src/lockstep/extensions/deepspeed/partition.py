"""Parameters in partitions (ZeRO stage 3): how a module comes into them, and what of it is whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.flat_part import span
from lockstep.checkpoint.pretrained import Source
from lockstep.ground import comm
from lockstep.ground.installed import Installation
from lockstep.ground.parameters import is_partitioned

DEEPSPEED_LINEAR = Installation(
    "torch.nn.functional.linear",
    ("extensions/deepspeed/partition.py",),
    "in forwards and backwards of stage 3, a linear layer keeps no view of a parameter that would hold its memory",
    stays=False,
)


def partition(
    module: nn.Module,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    gather: Callable[[Iterable[Tensor]], object],
    sources: Mapping[int, Source],
) -> dict[int, Tensor]:
    """Let each rank keep its part of rank 0's weights, layer by layer. Collective.

    Args:
        module: alike on all ranks but for its values; changed in place.
        config: of the engine.
        dtype: of the parts; None: as the parameters are.
        device: of this rank.
        gather: makes a layer's parameters whole, before they are cut.
        sources: of parameters that a folder fills, by id: each rank reads its part.

    Returns:
        by a parameter's id this rank's elements in the type that it had, where ``dtype`` is another.
    """
    import deepspeed

    align_numbers()
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), enabled=True)
    exact: dict[int, Tensor] = {}
    room = _Room(module, device)
    for layer in reversed(list(module.modules())):
        mine = [p for p in layer.parameters(recurse=False) if not is_partitioned(p)]
        made = [parameter for parameter in mine if id(parameter) not in sources]
        gather(made)
        for parameter in made:
            parameter.data = parameter.data.to(device)
        comm.broadcast_tensors([parameter.data for parameter in made], 0, None)
        for parameter in mine:
            source = sources.get(id(parameter))
            part = _part_of(parameter, source)
            own = parameter.dtype
            kept = dtype if dtype is not None and parameter.is_floating_point() else own
            if kept != own:
                exact[id(parameter)] = part.to(device, copy=True)
            if kept != own or source is not None:
                parameter.data = room.whole_with(part, parameter.shape, kept)
            init._convert_to_deepspeed_param(parameter)
            cut: Any = parameter
            cut.partition()
    return exact


def _part_of(parameter: Tensor, source: Source | None) -> Tensor:
    """This rank's elements of a parameter, in its type: those that it has, or those of a folder."""
    start, size = span(parameter.numel(), comm.rank(), comm.world_size())
    if source is None:
        return parameter.detach().flatten()[start : start + size]
    if not size:
        return torch.empty(0, dtype=parameter.dtype)
    return source.read_flat(start, size).to(parameter.dtype)


class _Room:
    """Memory in which one parameter after the other is whole while DeepSpeed cuts it.

    Were it taken for each and freed again, the C library would keep up to 64 MiB of what is free.

    Args:
        module: whose largest parameter fits.
        device: of the memory.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        sizes = (parameter.numel() * parameter.element_size() for parameter in module.parameters())
        self._bytes = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def whole_with(self, part: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A whole tensor that has this rank's elements in their place, and anything in the others'."""
        whole = self._bytes[: shape.numel() * dtype.itemsize].view(dtype)
        start, size = span(shape.numel(), comm.rank(), comm.world_size())
        whole[start : start + size].copy_(part)
        return whole.view(shape)


def align_numbers() -> None:
    """Let all ranks number layers and parameters alike, which DeepSpeed compares; collective.

    It counts on from engine to engine, and a rank may have had more of them than others.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (layers,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    largest = comm.all_reduce(torch.tensor([layers[0], Init.param_id]), "max").tolist()
    layers[0], Init.param_id = largest


def put(parameter: Any, value: Tensor) -> None:
    """Let a partitioned parameter have this value, of which this rank keeps its part; no other rank is asked.

    Args:
        parameter: of the module.
        value: whole, or this rank's elements.
    """
    start, size = span(parameter.ds_numel, comm.rank(), comm.world_size())
    whole = value.shape == parameter.ds_shape
    part = value.flatten()[start : start + size] if whole else value
    with torch.no_grad():
        parameter.ds_tensor.data[:size].copy_(part)
        if whole and parameter.data.shape == parameter.ds_shape:  # it is whole now
            parameter.data.copy_(value)


@contextmanager
def lean_linear() -> Iterator[None]:
    """Inside, linear layers keep the parameter for their backward, and not a view that would hold its memory.

    A backward that computes layers again has to be inside as well: each keeps as many tensors as the first time.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    own = nn.functional.linear
    with DEEPSPEED_LINEAR.inside():
        nn.functional.linear = zero3_linear_wrap
        try:
            yield
        finally:
            nn.functional.linear = own
