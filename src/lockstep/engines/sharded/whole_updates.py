"""Support for optimizers that need full parameters, although parameters are sharded: one rank updates each parameter.

The owner receives the shards of the gradient, runs the optimizer's own ``step``, and sends each rank its shard of the
new value. States are full tensors, and only on the owner. Parameters are processed in rounds: one parameter per owner,
or several small ones. While a round is computed, the gradients of the next one and the values of the last one are sent.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.checkpoint.flat_part import FlatPart
from lockstep.engines.owners import Owners, owners_of, parameters_of, without_gradients
from lockstep.engines.sharded.fully_shard import whole_of
from lockstep.ground import comm
from lockstep.ground.parameters import box_of, local_part
from lockstep.ground.tree import tree_map

ROUND = 2**25
"""Limit in bytes for one owner's parameters in a round; a larger parameter has a round to itself."""
ALIGNED = 16
"""Alignment of each tensor in a message, in bytes, so that the bytes can be viewed as the tensor's dtype."""

Box = tuple[slice, ...]
"""Range of indices in each dimension that a rank's shard covers."""


KEEPS: dict[type[Optimizer], Callable[[Mapping[str, Any]], float]] = {
    torch.optim.Muon: lambda group: 1 - float(group["lr"]) * float(group["weight_decay"])
}
"""Optimizer class -> factor by which the update scales a parameter's value, given the parameter group.

The rest of these optimizers' updates does not depend on the value and is added, so values need not be gathered.
"""


def cost_of(shape: Sequence[int]) -> int:
    """Return the relative cost of an update: the number of elements, for a matrix multiplied by its smaller side.

    >>> cost_of((4, 3)), cost_of((5,)), cost_of((2, 3, 4))
    (36, 5, 48)
    """
    elements = torch.Size(shape).numel()
    return elements * min(shape[0], elements // max(shape[0], 1)) if len(shape) > 1 else elements


class WholeUpdates(Owners):
    """Wrapper around optimizers that makes each rank update the sharded parameters that it owns as full tensors.

    Args:
        optimizers: optimizers that update each parameter independently; parameters are DTensors or full tensors.
        group: process group of the ranks, each with a shard of every parameter (possibly empty).
    """

    def __init__(self, optimizers: Iterable[Optimizer], group: comm.Group = None) -> None:
        super().__init__(optimizers, group)
        self._boxes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._take_all()
        self._assign([p for o in self._every for p in parameters_of(o)])  # frozen parameters, after the others

    def __contains__(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._own

    def _size(self, parameter: Tensor) -> int:
        return cost_of(parameter.shape)

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        """Assign an owner to each new parameter, and record the ranks' shards. Collective if any parameter is new."""
        new = [parameter for parameter in parameters if parameter not in self._boxes]
        if not new:
            return
        mine = [[(each.start, each.stop) for each in box_of(parameter)] for parameter in new]
        for parameter, *of_ranks in zip(new, *comm.all_gather_object(mine, self._group), strict=True):
            self._boxes[parameter] = [tuple(slice(*each) for each in box) for box in of_ranks]
        unowned = [parameter for parameter in new if parameter not in self._owners]
        for parameter, owner in zip(unowned, owners_of([*map(self._size, unowned)], self._load), strict=True):
            self._owners[parameter] = owner

    def _drop(self, optimizer: Optimizer) -> None:
        """Gather the states that the optimizer's constructor created, and keep them only on owner ranks. Collective."""
        for parameter in [p for p in parameters_of(optimizer) if p in optimizer.state]:
            optimizer.state[parameter] = self._whole(optimizer.state[parameter])
        super()._drop(optimizer)

    # -- a step

    @contextmanager
    def _updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Hide gradients in the block, so that no shard is updated. Then update full parameters on their owners."""
        updated = self._with_gradient(optimizer)
        rounds = _Rounds(self, optimizer, updated)
        with without_gradients(updated):
            yield
        rounds.run()

    def owner(self, parameter: Tensor) -> int:
        """Return the rank that updates a parameter."""
        found: int = self._owners[parameter]
        return found

    def boxes(self, parameter: Tensor) -> list[Box]:
        """Return a list with, for each rank, the slices of the full parameter that the rank's shard covers."""
        found: list[Box] = self._boxes[parameter]
        return found

    # -- states

    def state_in_parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state dict, with empty placeholders for tensors on other ranks. Collective."""
        part = self.part_of(optimizer)
        about = tree_map(lambda tensor: _About(tensor.shape, tensor.dtype), part["state"], Tensor)
        state: dict[int, Any] = {}
        for rank, theirs in enumerate(comm.all_gather_object(about, self._group)):
            state |= tree_map(_About.placeholder, theirs, _About) if rank != self._rank else {}
        state |= tree_map(lambda tensor: FlatPart(tensor.shape, 0, tensor.detach().reshape(-1)), part["state"], Tensor)
        return {**part, "state": {number: state[number] for number in sorted(state)}}

    def _whole(self, state: Any) -> Any:
        return tree_map(whole_of, state, Tensor)


@dataclass(frozen=True)
class _About:
    """Description of a tensor on another rank by shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype

    def placeholder(self) -> FlatPart:
        """Return an empty tensor that stands for the described tensor in a state dict."""
        return FlatPart(self.shape, 0, torch.empty(0, dtype=self.dtype))


# -- the rounds of a step ------------------------------------------------------------------------------------


class _Rounds:
    """Runner of one optimizer step in rounds: gather parameters on their owners, update them, send back new values.

    Args:
        owners: owners of the parameters.
        optimizer: the optimizer; its current groups are copied.
        updated: the parameters that have gradients, the same on all ranks.
    """

    def __init__(self, owners: WholeUpdates, optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
        self._owners, self._optimizer = owners, optimizer
        self._rank, self._world, self._group = owners._rank, owners._world, owners._group
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in _REPLACED}
        self._groups = [{**group} for group in optimizer.param_groups]
        keeps = KEEPS.get(type(optimizer))
        self._keeps: dict[int, float] = {}  # by parameter
        for group in self._groups if keeps is not None else ():
            kept = keeps(group)  # type: ignore[misc]  # there
            self._keeps |= {id(parameter): kept for parameter in group["params"]}
        of_owner: list[list[Tensor]] = [[] for _ in range(self._world)]
        # the most expensive first: the parameters of a round then cost each owner about the same
        for parameter in sorted(updated, key=lambda each: -cost_of(each.shape)):
            of_owner[owners.owner(parameter)].append(parameter)
        self._rounds = [list(row) for row in zip_longest(*map(_pieces, of_owner), fillvalue=())]

    @torch.no_grad()
    def run(self) -> None:
        """Update all parameters in rounds, sending a round's gradients during the previous round. Collective."""
        incoming = self._gather(self._rounds[0]) if self._rounds else None
        outgoing: tuple[Any, _Exchange] | None = None
        for number, row in enumerate(self._rounds):
            assert incoming is not None
            arrived, following = incoming, self._rounds[number + 1 :]
            # sent before this round is computed, so that the message overlaps the computation
            incoming = self._gather(following[0]) if following else None
            values = self._updated(row[self._rank], arrived.arrive())
            sent = row, self._scatter(row, values)
            if outgoing is not None:
                self._apply(*outgoing)
            outgoing = sent
        if outgoing is not None:
            self._apply(*outgoing)

    # -- from shards to the owner

    def _sources(self, parameter: Tensor) -> list[tuple[int, Box]]:
        """Return (rank, range) of each shard from which the owner assembles a parameter. Prefer the owner's shard."""
        owner, boxes = self._owners.owner(parameter), self._owners.boxes(parameter)
        found: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, box in enumerate(boxes):
            if _numel(box):
                found.setdefault(tuple((each.start, each.stop) for each in box), []).append(rank)
        if _numel(boxes[owner]) == parameter.numel():
            return [(owner, boxes[owner])]
        chosen = [owner if owner in ranks else ranks[owner % len(ranks)] for ranks in found.values()]
        return [(rank, boxes[rank]) for rank in chosen]

    def _to_send(self, parameter: Tensor) -> list[Tensor]:
        """Return this rank's tensors that the owner needs: the gradient, and the value if the update uses it."""
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        return [gradient] if id(parameter) in self._keeps else [gradient, local_part(parameter.detach())]

    def _gather(self, row: Sequence[Sequence[Tensor]]) -> _Exchange:
        send: list[list[Tensor]] = [[] for _ in row]
        expected: list[list[_About]] = [[] for _ in row]
        for owner, parameters in enumerate(row):
            for parameter in parameters:
                given = self._to_send(parameter)
                for rank, box in self._sources(parameter):
                    if owner == rank:
                        continue
                    if rank == self._rank:
                        send[owner] += given
                    if owner == self._rank:
                        expected[rank] += [_About(_shape(box), each.dtype) for each in given]
        return self._exchange(send, expected, row)

    def _exchange(
        self, send: list[list[Tensor]], expected: list[list[_About]], row: Sequence[Sequence[Tensor]]
    ) -> _Exchange:
        first = next(parameter for parameters in row for parameter in parameters)
        return _Exchange(send, expected, local_part(first.detach()).device, self._group)

    def _wholes(self, parameter: Tensor, arrived: list[Iterator[Tensor]]) -> list[Tensor]:
        """Assemble the full gradient and, if needed, the full value of a parameter that this rank owns."""
        mine, sources = self._to_send(parameter), self._sources(parameter)
        if len(sources) == 1 and sources[0][0] == self._rank:
            return [mine[0], *(each.clone() for each in mine[1:])]
        made = [each.new_empty(parameter.shape) for each in mine]
        for rank, box in sources:
            parts = mine if rank == self._rank else [next(arrived[rank]) for _ in mine]
            for whole, part in zip(made, parts, strict=True):
                whole[box] = part
        return made

    # -- the update

    def _updated(self, parameters: Sequence[Tensor], arrived: list[list[Tensor]]) -> list[Tensor]:
        """Return the new values of ``parameters``, or the amounts to add if only gradients were gathered."""
        streams = [iter(each) for each in arrived]
        substitutes: dict[int, Parameter] = {}
        optimizer = self._optimizer
        for parameter in parameters:
            gradient, *value = self._wholes(parameter, streams)
            substitute = Parameter(value[0] if value else torch.zeros_like(gradient), requires_grad=False)
            substitute.grad = gradient
            substitutes[id(parameter)] = substitute
        # A copy of the optimizer over whole parameters, without its hooks: these run once, around the whole step.
        # `object.__new__`, since a constructor may create states or need other arguments.
        inner: Any = object.__new__(type(optimizer))
        vars(inner).update(self._attributes)
        vars(inner).update({name: OrderedDict() for name in _HOOKS})
        inner.param_groups = []
        for group in self._groups:
            # copied: changes to options are lost, so that each round starts with the same ones
            options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            own = [substitutes[id(p)] for p in group["params"] if id(p) in substitutes]
            inner.param_groups.append({**options, "params": own})
        state = optimizer.state
        inner.state = defaultdict(dict, {substitutes[id(p)]: state[p] for p in parameters if p in state})
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):  # torch has wrapped it, to call hooks of all optimizers
            step = step.__wrapped__
        step(inner)
        for parameter in parameters:
            substitute = substitutes[id(parameter)]
            if inner.state.get(substitute):
                state[parameter] = inner.state[substitute]
        return [substitutes[id(parameter)].detach() for parameter in parameters]

    # -- from the owner to shards

    def _scatter(self, row: Sequence[Sequence[Tensor]], values: Sequence[Tensor]) -> _Exchange:
        send: list[list[Tensor]] = [[] for _ in row]
        expected: list[list[_About]] = [[] for _ in row]
        for owner, parameters in enumerate(row):
            for place, parameter in enumerate(parameters):
                for rank, box in enumerate(self._owners.boxes(parameter)):
                    if not _numel(box):
                        continue
                    if owner == self._rank:
                        send[rank].append(values[place][box])
                    if rank == self._rank:
                        expected[owner].append(_About(_shape(box), local_part(parameter.detach()).dtype))
        return self._exchange(send, expected, row)

    def _apply(self, row: Sequence[Sequence[Tensor]], exchange: _Exchange) -> None:
        """Overwrite this rank's shards with the values that ``exchange`` receives, or add received amounts to them."""
        streams = [iter(each) for each in exchange.arrive()]
        for owner, parameters in enumerate(row):
            for parameter in parameters:
                if not _numel(self._owners.boxes(parameter)[self._rank]):
                    continue
                part, new = local_part(parameter.detach()), next(streams[owner])
                if id(parameter) in self._keeps:
                    part.mul_(self._keeps[id(parameter)]).add_(new)
                else:
                    part.copy_(new)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_REPLACED = {*Owners.METHODS, *_HOOKS, "_owned", "zero_grad", "state", "param_groups"}
"""Attributes that are not copied to the temporary optimizer of a round."""


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide one owner's parameters into lists of limited size in bytes, one list for each round."""
    piece: list[Tensor] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if piece and size + nbytes > ROUND:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += nbytes
    if piece:
        yield piece


def _shape(box: Box) -> torch.Size:
    return torch.Size([each.stop - each.start for each in box])


def _numel(box: Box) -> int:
    return _shape(box).numel()


class _Exchange:
    """Asynchronous exchange of tensors between all ranks.

    Args:
        send: tensors by receiving rank; tensors for this rank itself are not copied.
        expected: shapes and dtypes of the tensors from each rank.
        device: device of the received tensors.
        group: process group of the ranks.
    """

    def __init__(
        self, send: list[list[Tensor]], expected: list[list[_About]], device: torch.device, group: comm.Group
    ) -> None:
        rank = comm.rank(group)
        self._own = send[rank]
        self._expected = [[] if sender == rank else each for sender, each in enumerate(expected)]
        self._rank, self._device, self._work = rank, device, None
        if len(send) == 1:
            return
        carrier = comm.carrier(group, device)
        packed: list[list[Tensor]] = [[] for _ in send]
        for other, tensors in enumerate(send):
            for tensor in tensors if other != rank else ():
                flat = comm.as_bytes(tensor).to(carrier)
                packed[other] += [flat, flat.new_zeros(_padded(flat.numel()) - flat.numel())]
        sizes = [sum(part.numel() for part in each) for each in packed]
        received = [sum(_padded(_bytes(about)) for about in each) for each in self._expected]
        self._out = torch.empty(sum(received), dtype=torch.uint8, device=carrier)
        parts = [part for each in packed for part in each]
        self._sent = torch.cat(parts) if parts else self._out.new_empty(0)  # kept alive as long as the message
        self._work = dist.all_to_all_single(self._out, self._sent, received, sizes, group=group, async_op=True)

    def arrive(self) -> list[list[Tensor]]:
        """Wait for the exchange, and return, for each sender, a list of the received tensors."""
        found: list[list[Tensor]] = [[] for _ in self._expected]
        if self._work is not None:
            self._work.wait()
            flat, start = self._out.to(self._device), 0
            for sender, expected in enumerate(self._expected):
                for about in expected:
                    part = flat[start : start + _bytes(about)]
                    found[sender].append(part.view(about.dtype).view(about.shape))
                    start += _padded(_bytes(about))
        found[self._rank] = self._own
        return found


def _bytes(about: _About) -> int:
    return about.shape.numel() * about.dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
