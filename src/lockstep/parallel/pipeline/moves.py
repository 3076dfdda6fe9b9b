"""Blocks that go from one rank of a pipeline to another, with all that belongs to them.

What goes: parameters, gradients that are there, states of optimizers, buffers, and what a layer's ``get_extra_state``
gives. Values are not changed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.ground import comm
from lockstep.parallel.pipeline.layout import Ownership

SMALL = 64
"""Elements of a tensor, at most, that goes along with the message that announces it."""


@dataclass(frozen=True)
class _Announced:
    """Stands for a tensor that follows by itself."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Enclosed:
    """A tensor that goes along with the announcement."""

    tensor: Tensor
    on_device: bool
    """Whether its place is the rank's device; else it is the CPU, as of a count of steps."""


@dataclass(frozen=True)
class _Item:
    """Something that goes from a rank to another: a parameter, a buffer, or the layer whose extra state goes."""

    of: Any
    name: str
    source: int
    target: int


class _Post:
    """Messages that one rank sends and receives in a move.

    Args:
        group: the ranks.
        device: of this rank.
    """

    def __init__(self, group: comm.Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._members, self._wire = comm.ranks_of(group), comm.carrier(group, device)
        self._under_way: list[tuple[Any, Tensor]] = []
        self._arrived: list[tuple[Tensor, Tensor]] = []
        self._operations: list[Any] = []
        self.size = 0

    def announce(self, value: Any) -> Any:
        """What is told of a value beforehand: all of it, or what it is like."""
        if isinstance(value, Tensor):
            on_device = value.device.type == self._device.type
            if on_device and value.numel() > SMALL and value.layout is torch.strided:
                return _Announced(value.shape, value.dtype)
            return _Enclosed(value.detach().cpu().clone(), on_device)
        return value

    def send(self, value: Any, target: int) -> None:
        """What was announced as a tensor that follows."""
        if isinstance(self.announce(value), _Announced):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).to(self._wire)
            self._operations.append(dist.P2POp(dist.isend, data, self._members[target], self._group))
            self.size += data.numel()

    def receive(self, told: Any, source: int) -> Any:
        """What stands for a value that was told; tensors have their values after :meth:`exchange`."""
        if isinstance(told, _Announced):
            tensor = torch.empty(told.shape, dtype=told.dtype, device=self._device)
            flat = tensor.reshape(-1).view(torch.uint8)
            data = flat if flat.device == self._wire else torch.empty_like(flat, device=self._wire)
            self._operations.append(dist.P2POp(dist.irecv, data, self._members[source], self._group))
            self._arrived.append((flat, data))
            return tensor
        if isinstance(told, _Enclosed):
            return told.tensor.to(self._device) if told.on_device else told.tensor
        return told

    def exchange(self) -> None:
        """Let all messages go, and wait for them."""
        for work in dist.batch_isend_irecv(self._operations) if self._operations else ():
            work.wait()
        for flat, data in self._arrived:
            if flat is not data:
                flat.copy_(data)


def move(
    module: nn.Module, before: Ownership, after: Ownership, optimizers: Sequence[Optimizer], group: comm.Group
) -> int:
    """Bring to each rank what it holds ``after`` and did not hold ``before``. Collective.

    What ranks hold no longer is left to them.

    Args:
        module: with no values for what others hold.
        before, after: of this rank.
        optimizers: that keep states for the parameters.
        group: the ranks of the pipeline.

    Returns:
        bytes that this rank has sent.
    """
    device = next(iter(before.held)).device
    post, items = _Post(group, device), list(_items(module, before, after))
    mine = {at: _described(item, optimizers, post) for at, item in enumerate(items) if item.source == before.place}
    told: dict[int, dict[str, Any]] = {}
    for part in comm.all_gather_object(mine, group):
        told.update(part)
    arrived: dict[int, dict[str, Any]] = {}
    for at, item in enumerate(items):
        if item.source == before.place:
            for value in _values(item, optimizers).values():
                post.send(value, item.target)
        elif item.target == before.place:
            arrived[at] = {key: post.receive(value, item.source) for key, value in told[at].items()}
    post.exchange()
    for at, values in arrived.items():
        _take(items[at], values, optimizers)
    return post.size


def _items(module: nn.Module, before: Ownership, after: Ownership) -> Iterator[_Item]:
    """What goes where, in an order that is the same on all ranks."""
    for name, parameter in module.named_parameters():
        source = before.owner(parameter)
        for target in sorted(after.holders(parameter) - before.holders(parameter)):
            yield _Item(parameter, name, source, target)
    for name, buffer in module.named_buffers():
        if after.owner_of(name) != before.owner_of(name):
            yield _Item(buffer, name, before.owner_of(name), after.owner_of(name))
    for name, layer in module.named_modules():
        own = type(layer).get_extra_state is not nn.Module.get_extra_state
        if own and after.owner_of(f"{name}.") != before.owner_of(f"{name}."):
            yield _Item(layer, name, before.owner_of(f"{name}."), after.owner_of(f"{name}."))


def _values(item: _Item, optimizers: Sequence[Optimizer]) -> dict[Any, Any]:
    """All that goes with an item, by a key."""
    if isinstance(item.of, nn.Module):
        return {"extra": item.of.get_extra_state()}
    values: dict[Any, Any] = {"value": item.of}
    if isinstance(item.of, Parameter):
        if item.of.grad is not None:
            values["gradient"] = item.of.grad
        for number, optimizer in enumerate(optimizers):
            if item.of in optimizer.state:
                values[number, None] = None  # it has a state, if an empty one
                values.update({(number, key): value for key, value in optimizer.state[item.of].items()})
    return values


def _described(item: _Item, optimizers: Sequence[Optimizer], post: _Post) -> dict[Any, Any]:
    return {key: post.announce(value) for key, value in _values(item, optimizers).items()}


def _take(item: _Item, values: dict[Any, Any], optimizers: Sequence[Optimizer]) -> None:
    """Put what has arrived into its place."""
    if isinstance(item.of, nn.Module):
        item.of.set_extra_state(values["extra"])
        return
    item.of.data = values.pop("value")
    if isinstance(item.of, Parameter):
        item.of.grad = values.pop("gradient", None)
    for key, value in values.items():
        number, name = key
        state = optimizers[number].state[item.of]
        if name is not None:
            state[name] = value
