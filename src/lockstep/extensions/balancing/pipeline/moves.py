"""Moves of blocks from one rank of a pipeline to another.

With a block go its parameters, gradients, optimizer states and buffers, and the ``get_extra_state`` of its layers.
Values stay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.extensions.balancing.pipeline.layout import Ownership
from lockstep.ground import comm

SMALL = 64
"""Maximum number of elements of a tensor that is sent inside the announcement."""


@dataclass(frozen=True)
class _Announced:
    """Announcement of a large tensor by shape and dtype. The tensor's values are sent in a later message."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Enclosed:
    """A small tensor that is sent within the announcement itself."""

    tensor: Tensor
    on_device: bool
    """True if the tensor belongs on the rank's device, False for the CPU (Adam's count of steps)."""


PARAMETER, BUFFER, EXTRA = range(3)


@dataclass(frozen=True)
class _Item:
    """A parameter, buffer or extra state that moves from this rank to another.

    Attributes:
        kind: `PARAMETER`, `BUFFER` or `EXTRA`.
        name: name in the module; for an extra state, the name of its layer.
        target: the rank that receives it.
    """

    kind: int
    name: str
    target: int


class _Post:
    """Sender and receiver of one rank's messages when blocks move.

    Args:
        group: the ranks.
        device: this rank's device.
    """

    def __init__(self, group: comm.Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._members, self._wire = comm.ranks_of(group), comm.carrier(group, device)
        self._under_way: list[tuple[Any, Tensor]] = []
        self._arrived: list[tuple[Tensor, Tensor]] = []
        self._operations: list[Any] = []
        self.size = 0

    def announce(self, value: Any) -> Any:
        """Return the announcement of ``value``: a large tensor's shape and dtype, else the value or its copy."""
        if isinstance(value, Tensor):
            on_device = value.device.type == self._device.type
            # sparse and other layouts cannot be received into a flat buffer
            if on_device and value.numel() > SMALL and value.layout is torch.strided:
                return _Announced(value.shape, value.dtype)
            return _Enclosed(value.detach().cpu().clone(), on_device)
        return value

    def send(self, value: Any, target: int) -> None:
        """Queue ``value`` for sending if it is a large tensor. The announcement contains any other value."""
        if isinstance(self.announce(value), _Announced):
            # as bytes: backends do not support all dtypes
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).to(self._wire)
            self._operations.append(dist.P2POp(dist.isend, data, self._members[target], self._group))
            self.size += data.numel()

    def receive(self, entry: Any, source: int) -> Any:
        """Return the value announced by ``entry``. A large tensor is uninitialized until :meth:`exchange` fills it."""
        if isinstance(entry, _Announced):
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            flat = tensor.reshape(-1).view(torch.uint8)
            data = flat if flat.device == self._wire else torch.empty_like(flat, device=self._wire)
            self._operations.append(dist.P2POp(dist.irecv, data, self._members[source], self._group))
            self._arrived.append((flat, data))
            return tensor
        if isinstance(entry, _Enclosed):
            return entry.tensor.to(self._device) if entry.on_device else entry.tensor
        return entry

    def exchange(self) -> None:
        """Send and receive all queued tensors, and wait for them."""
        for work in dist.batch_isend_irecv(self._operations) if self._operations else ():
            work.wait()
        for flat, data in self._arrived:
            if flat is not data:
                flat.copy_(data)


def move(
    module: nn.Module,
    before: Ownership,
    after: Ownership,
    optimizers: Sequence[Optimizer],
    group: comm.Group,
    device: torch.device,
) -> int:
    """Move blocks to their new ranks, with gradients, buffers and optimizer states. Collective.

    The sender keeps its values.

    Args:
        module: the module, in which tensors of other ranks have no values.
        before: ranks of each tensor before the move.
        after: ranks of each tensor after the move.
        optimizers: optimizers, whose states move with the parameters.
        group: the ranks of the pipeline.
        device: this rank's device.

    Returns:
        bytes that this rank has sent, without small tensors.
    """
    post, place = _Post(group, device), before.place
    mine: list[tuple[_Item, dict[Any, Any]]] = []
    for item in _items(module, before, after):
        values = _values(module, item, optimizers)
        mine.append((item, {key: post.announce(value) for key, value in values.items()}))
        for value in values.values():
            post.send(value, item.target)
    arrived: list[tuple[_Item, dict[Any, Any]]] = []
    # senders announce their tensors: a layer may have created a buffer in its forward, which receivers do not have
    for source, announced in enumerate(comm.all_gather_object(mine, group)):
        for item, entries in announced:
            if item.target == place:
                arrived.append((item, {key: post.receive(entry, source) for key, entry in entries.items()}))
    post.exchange()
    for item, values in arrived:
        _take(module, item, values, optimizers)
    return post.size


def _items(module: nn.Module, before: Ownership, after: Ownership) -> Iterator[_Item]:
    """Yield the parameters, buffers and extra states that this rank must send, each with its receiver."""
    place = before.place
    for name, parameter in module.named_parameters():
        if before.owner(parameter) == place:
            for target in sorted(after.holders(parameter) - before.holders(parameter)):
                yield _Item(PARAMETER, name, target)
    for name, _ in module.named_buffers():
        if before.owner_of(name) == place != after.owner_of(name):
            yield _Item(BUFFER, name, after.owner_of(name))
    for name, layer in module.named_modules():
        inside, has_state = f"{name}.", type(layer).get_extra_state is not nn.Module.get_extra_state
        if has_state and before.owner_of(inside) == place != after.owner_of(inside):
            yield _Item(EXTRA, name, after.owner_of(inside))


def _values(module: nn.Module, item: _Item, optimizers: Sequence[Optimizer]) -> dict[Any, Any]:
    """Return the values to send for an item, by key."""
    if item.kind == EXTRA:
        return {"extra": module.get_submodule(item.name).get_extra_state()}
    if item.kind == BUFFER:
        layer, _, name = item.name.rpartition(".")
        persists = name not in module.get_submodule(layer)._non_persistent_buffers_set
        return {"value": module.get_buffer(item.name), "persists": persists}
    parameter = module.get_parameter(item.name)
    values: dict[Any, Any] = {"value": parameter}
    if parameter.grad is not None:
        values["gradient"] = parameter.grad
    for number, optimizer in enumerate(optimizers):
        if parameter in optimizer.state:
            values[number, None] = None  # an empty state is sent as well
            values.update({(number, key): value for key, value in optimizer.state[parameter].items()})
    return values


def _take(module: nn.Module, item: _Item, values: dict[Any, Any], optimizers: Sequence[Optimizer]) -> None:
    """Store the received values of an item in the module and the optimizers."""
    if item.kind == EXTRA:
        module.get_submodule(item.name).set_extra_state(values["extra"])
        return
    if item.kind == BUFFER:
        layer, _, name = item.name.rpartition(".")
        own = module.get_submodule(layer)
        if own._buffers.get(name) is None:
            own.register_buffer(name, values["value"], values["persists"])
        else:
            module.get_buffer(item.name).data = values["value"]
        return
    parameter = module.get_parameter(item.name)
    parameter.data, parameter.grad = values.pop("value"), values.pop("gradient", None)
    for (number, name), value in values.items():
        state = optimizers[number].state[parameter]
        if name is not None:
            state[name] = value
