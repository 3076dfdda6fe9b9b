"""Partitioned parameters (ZeRO stage 3): functions that divide a module into shards and write values into shards."""

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
    "keeps linear layers of stage 3 from saving a view of a parameter, which would keep its memory",
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
    """Partition a module in place: each rank keeps its shard of rank 0's weights, layer by layer. Collective.

    Args:
        module: has the same parameters on all ranks; their values may differ.
        config: the engine's config.
        dtype: dtype of the shards; None: that of the parameters.
        device: this rank's device.
        gather: creates the values of a layer's parameters, before the parameters are partitioned.
        sources: files with the values of parameters, by the parameter's id: each rank reads its shard.

    Returns:
        this rank's elements in their original dtype, by the parameter's id, for parameters whose dtype changes.
    """
    import deepspeed

    align_numbers()
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), enabled=True)
    exact: dict[int, Tensor] = {}
    room = _Room(module, device)
    # layer by layer, so that a rank never has more than one layer whole on its device
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
    """Return this rank's elements of a parameter in the parameter's dtype, read from the file ``source`` if given."""
    start, size = span(parameter.numel(), comm.rank(), comm.world_size())
    if source is None:
        return parameter.detach().flatten()[start : start + size]
    if not size:
        return torch.empty(0, dtype=parameter.dtype)
    return source.read_flat(start, size).to(parameter.dtype)


class _Room:
    """Buffer for one full parameter at a time, reused while DeepSpeed partitions a module.

    Args:
        module: the module, whose largest parameter fits into the buffer.
        device: device of the memory.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        # taken once: with an allocation per parameter the C library keeps up to 64 MiB of freed memory
        sizes = (parameter.numel() * parameter.element_size() for parameter in module.parameters())
        self._bytes = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def whole_with(self, part: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of a parameter's full shape with this rank's elements. All other elements are undefined."""
        whole = self._bytes[: shape.numel() * dtype.itemsize].view(dtype)
        start, size = span(shape.numel(), comm.rank(), comm.world_size())
        whole[start : start + size].copy_(part)
        return whole.view(shape)


def align_numbers() -> None:
    """Set DeepSpeed's counters of layers and parameters to the same values on all ranks. Collective.

    DeepSpeed compares these numbers between ranks. It counts over all engines of a process, and a rank may have made
    more engines than others.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (layers,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    largest = comm.all_reduce(torch.tensor([layers[0], Init.param_id]), "max").tolist()
    layers[0], Init.param_id = largest


def put(parameter: Any, value: Tensor) -> None:
    """Write a value into this rank's shard of a partitioned parameter. Not collective.

    Args:
        parameter: a partitioned parameter of the module.
        value: the full value, or this rank's elements.
    """
    start, size = span(parameter.ds_numel, comm.rank(), comm.world_size())
    whole = value.shape == parameter.ds_shape
    part = value.flatten()[start : start + size] if whole else value
    with torch.no_grad():
        parameter.ds_tensor.data[:size].copy_(part)
        # a parameter that is gathered now has a second copy of the values
        if whole and parameter.data.shape == parameter.ds_shape:
            parameter.data.copy_(value)


@contextmanager
def lean_linear() -> Iterator[None]:
    """Inside the block, linear layers save the parameter for the backward. A view would keep the full weight in memory.

    A backward that recomputes layers must run in this context, too, since torch checks that the layers save as many
    tensors as in the first forward.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    own = nn.functional.linear
    with DEEPSPEED_LINEAR.inside():
        nn.functional.linear = zero3_linear_wrap
        try:
            yield
        finally:
            nn.functional.linear = own
