"""Parameters in partitions (ZeRO stage 3): how a module comes into them, and what of it is whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.pretrained import Source
from lockstep.ground import comm
from lockstep.ground.installed import DEEPSPEED_LINEAR
from lockstep.ground.parts import is_partitioned


def span(numel: int, rank: int, world: int) -> tuple[int, int]:
    """The first element of a rank's part, and how many it has without padding.

    Example:
        >>> [span(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 2), (4, 1)]
    """
    size = -(-numel // world)
    start = min(rank * size, numel)
    return start, min(size, numel - start)


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

    rank, world = comm.rank(), comm.world_size()
    align_numbers()
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), enabled=True)
    exact: dict[int, Tensor] = {}
    for layer in reversed(list(module.modules())):
        mine = [p for p in layer.parameters(recurse=False) if not is_partitioned(p)]
        made = [parameter for parameter in mine if id(parameter) not in sources]
        gather(made)
        for parameter in made:
            parameter.data = parameter.data.to(device)
        comm.broadcast_tensors([parameter.data for parameter in made], 0, None)
        for parameter in mine:
            if id(parameter) in sources:
                _read(parameter, sources[id(parameter)], device)
            if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                start, size = span(parameter.numel(), rank, world)
                exact[id(parameter)] = parameter.data.flatten()[start : start + size].clone()
                parameter.data = parameter.data.to(dtype)
            init._convert_to_deepspeed_param(parameter)
            cut: Any = parameter
            cut.partition()
    return exact


def _read(parameter: nn.Parameter, source: Source, device: torch.device) -> None:
    """Give a parameter the memory of the whole, and of the values this rank's elements."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    start, size = span(whole.numel(), comm.rank(), comm.world_size())
    if size:
        whole.view(-1)[start : start + size].copy_(source.read_flat(whole.shape, start, size))
    parameter.data = whole


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
