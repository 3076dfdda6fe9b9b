"""Ranks whose weights differ for a while, and the one model that everybody else sees of them.

Under local steps (post-local SGD, local SGD with an outer optimizer) the ranks, or the nodes, train weights of their
own between two averages. Whoever looks at the model in between (a validation, the weights in a checkpoint, the user
when the fit is over) sees the *mean*: the ranks' parameters averaged, with rank 0's buffers. Then each rank goes on
with its *own*, so that looking changes nothing, and a run that was looked at has the bits of one that was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.snapshot import snapshot
from lockstep.ground import comm
from lockstep.ground.tree import tree_map
from lockstep.parallel.averaging import average
from lockstep.parallel.late_parameters import beside


class Apart:
    """This rank's own weights and optimizers, beside the mean that others are shown.

    Args:
        module: of the fit.
        optimizers: whose states part with the weights, and do not meet again.
        scaler: of 16-bit precision, or None: it follows this rank's overflows.
        share_buffers: whether the mean comes with rank 0's buffers; else each rank keeps its own.

    Attributes:
        differ: whether the ranks' weights may differ now.
        parted: whether they ever did, in this fit or the one that it goes on from: optimizers differ since then.
    """

    def __init__(self, module: Any, optimizers: list[Any], scaler: Any, share_buffers: bool) -> None:
        self.differ = self.parted = False
        self._module = module
        self._optimizers = optimizers
        self._scaler = scaler
        self._share_buffers = share_buffers
        self._trained: set[str] = set()
        self._own: dict[str, Tensor] | None = None

    @property
    def shown(self) -> bool:
        """Whether the module holds the mean now, and this rank's own weights are put aside."""
        return self._own is not None

    def step(self) -> None:
        """A step is made with this rank's or node's gradients alone."""
        self.differ = self.parted = True

    def meet(self) -> None:
        """All ranks have taken the same parameters."""
        self.differ = False

    # -- looking

    def show_mean(self) -> None:
        """Put the mean in the place of this rank's weights and buffers, until `show_own`. Collective."""
        if self._own is None:
            parameters, buffers = self._parameters(), dict(self._module.named_buffers())
            self._own = {name: tensor.detach().clone() for name, tensor in {**parameters, **buffers}.items()}
            average(list(parameters.values()))
            if self._share_buffers:
                comm.broadcast_tensors(buffers.values())

    @torch.no_grad()
    def show_own(self) -> None:
        """Put this rank's weights and buffers back."""
        if self._own is not None:
            _copy(self._own, self._tensors())
            self._own = None

    def named_parameters(self) -> dict[str, Tensor]:
        """The module's, and those that the optimizers alone have."""
        return {**dict(self._module.named_parameters()), **beside(self._module, self._optimizers)}

    def _parameters(self) -> dict[str, Tensor]:
        """Those that were trained: a frozen one is alike on all ranks, and the mean of equals may round."""
        named = self.named_parameters()
        self._trained.update(name for name, parameter in named.items() if parameter.requires_grad)
        return {name: parameter for name, parameter in named.items() if name in self._trained}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.named_parameters(), **dict(self._module.named_buffers())}

    # -- saving

    def state_dict(self, leader: int) -> dict[str, Any]:
        """What this rank alone needs to go on with the same bits, on the CPU.

        Args:
            leader: the first of the ranks that have the same parameters and optimizers, who alone saves them.
        """
        if not self.parted:
            return {}
        state: dict[str, Any] = {"leader": leader, "differ": self.differ}
        if self.differ:
            own = self._own or {**self._parameters(), **dict(self._module.named_buffers())}
            buffers = {name for name, _ in self._module.named_buffers()}
            mine = comm.rank() == leader
            state["tensors"] = {name: tensor.detach() for name, tensor in own.items() if mine or name in buffers}
        if comm.rank() == leader:
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
            if self._scaler is not None:
                state["scaler"] = self._scaler.state_dict()
        return snapshot(state)

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's part of what `state_dict` gave on all ranks, which are as many now."""
        mine = states[comm.rank()]
        if not mine:
            return
        leader = states[mine["leader"]]
        self.parted, self.differ = True, mine["differ"]
        if self.differ:
            _copy({**leader["tensors"], **mine["tensors"]}, self._tensors())
            self._trained.update(leader["tensors"])
        for optimizer, saved in zip(self._optimizers, leader["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(leader["scaler"])


def _copy(saved: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in saved.items():
        tensors[name].detach().copy_(tensor)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor that travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gathered(obj: Any) -> list[Any]:
    """What all ranks pass, by rank, on rank 0; an empty list on the others, who need no copies of it. Collective.

    Tensors travel one by one, so that rank 0 needs memory for what it gets and little more.

    Args:
        obj: dicts, lists and tuples of CPU tensors and of what can be pickled.
    """
    if comm.world_size() == 1:
        return [obj]
    device = comm.carrier(None, torch.device("cpu"))
    if comm.rank() != 0:
        tensors: list[Tensor] = []

        def leave(tensor: Tensor) -> _Place:
            tensors.append(tensor)
            return _Place(tuple(tensor.shape), tensor.dtype)

        dist.gather_object(tree_map(leave, obj, Tensor), None, 0)
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.contiguous().reshape(-1).view(torch.uint8).to(device), 0)
        return []
    objects: list[Any] = [None] * comm.world_size()
    dist.gather_object(None, objects, 0)

    def fetch(place: _Place, source: int) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if tensor.numel():
            raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
            dist.recv(raw, source)
            tensor.copy_(raw.cpu().view(place.dtype).view(place.shape))
        return tensor

    return [obj, *(tree_map(partial(fetch, source=r), objects[r], _Place) for r in range(1, len(objects)))]
