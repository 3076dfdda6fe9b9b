"""Support for uneven batches: weighted means over ranks, and ``join`` for ranks that have run out of batches."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from lockstep.engines.ddp.consistency import broadcast_module_state
from lockstep.engines.ddp.reducer import Reducer
from lockstep.extensions.parallel.backward_watcher import BackwardWatcher, find_tensors
from lockstep.ground import comm
from lockstep.ground.device import widest
from lockstep.ground.tree import tree_map

# -- weights -------------------------------------------------------------------------------------------------


def check_weight(n: float, rank: int) -> float:
    """Check the weight of a batch, and return the weight as a float.

    Raises:
        ValueError: the weight is negative or not finite.
    """
    weight = float(n)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"weight({n}) on rank {rank}: pass a finite number of at least 0, for example the number of samples"
        )
    return weight


class Weight:
    """Weight of one forward, and the factor that multiplies the forward's gradients. Creating it is collective.

    Args:
        weight: weight of this rank's batch.
        group: process group of the ranks.
        device: device of the model.
        naming: returns a context that adds the missing rank to the error of a failed collective.
    """

    def __init__(
        self,
        weight: float,
        group: comm.Group,
        device: torch.device,
        naming: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
    ) -> None:
        self.weight = weight
        self._naming = naming
        self._world = comm.world_size(group)
        self._factor: Tensor | None = None
        if self._world > 1:
            # not `torch.tensor`, which synchronizes with a GPU
            by = comm.carrier(group, device)
            self._total = torch.full((), weight, dtype=widest(by), device=by)
            self._work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def factor(self) -> Tensor | float:
        """Return the factor for gradients: this rank's weight, divided by the mean weight of all ranks."""
        if self._world == 1:
            return 1.0
        # the sum was started before the forward, so that it is there when the backward needs it
        if self._factor is None:
            with self._naming("adding up the weights"):
                self._work.wait()
            self._factor = self.weight * self._world / self._total
        return self._factor

    def apply(self, outputs: object) -> Any:
        """Return ``outputs`` with the same values; the backward multiplies their gradients by `factor`.

        Raises:
            TypeError: a tensor is in an object that is neither a collection nor a dataclass.
        """
        weighed: set[int] = set()

        def weigh(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            through = _Weighed.apply(tensor, self)
            weighed.add(id(through))
            return through

        result = tree_map(weigh, outputs, Tensor)
        if any(tensor.requires_grad and id(tensor) not in weighed for tensor in find_tensors(result)):
            raise TypeError(
                f"weight(): the model's output ({type(outputs).__name__}) is or contains an object with tensors as "
                "attributes. Their gradients cannot be weighted. Return the tensors in a tuple, list, dict or dataclass"
            )
        return result


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight: Weight = ctx.weight
        # not by multiplication: a batch of weight 0 may have any gradient, and 0 times inf is NaN
        return (grad * weight.factor() if weight.weight else torch.zeros_like(grad)), None


# -- join ----------------------------------------------------------------------------------------------------


class JoinAgreement(NamedTuple):
    """Result of the ranks' agreement before a forward: who has batches, and what they synchronize.

    Attributes:
        active: number of ranks that still have batches.
        leader: the last rank that still has batches; all ranks take its buffers.
        sync: True if a synchronized backward follows.
        buffers: True if buffers are synchronized before the forward.
    """

    active: int
    leader: int
    sync: bool
    buffers: bool


def agree(group: comm.Group, device: torch.device, active: bool, sync: bool, buffers: bool) -> JoinAgreement:
    """Exchange in one message which ranks have a batch and what they synchronize. Collective over all ranks.

    Args:
        group: process group of the ranks.
        device: device of the model.
        active: True if this rank has a batch; the other arguments count only then.
        sync: True if this rank's backward is synchronized.
        buffers: True if this rank synchronizes buffers before its forward.
    """
    world = comm.world_size(group)
    votes = torch.zeros(world + 2, dtype=torch.int32)
    if active:
        votes[comm.rank(group)], votes[world], votes[world + 1] = 1, sync, buffers
    votes = votes.to(comm.carrier(group, device))
    if world > 1:
        dist.all_reduce(votes, group=group)
    found = votes.tolist()
    there = [rank for rank in range(world) if found[rank]]
    return JoinAgreement(len(there), there[-1] if there else 0, found[world] > 0, found[world + 1] > 0)


class JoinedContainer(Protocol):
    """Protocol with the members of `DistributedDataParallel` that a join uses."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    joining: JoinState
    _join_config: _JoinConfig
    _authoritative_rank: int
    _watch: BackwardWatcher

    @property
    def reducer(self) -> Reducer:
        """Reducer that averages the gradients."""
        ...

    def skip_backward(self) -> None:
        """Take part in the other ranks' backward without running one on this rank."""
        ...

    def _align_buffers(self, src: int) -> None: ...

    def _compare(self, stage: str) -> None: ...


class JoinState:
    """State of a container while it takes part in a ``Join``.

    Attributes:
        by_all: if True, divide gradients by the number of all ranks; else by that of ranks with batches.
        active: number of ranks with batches in the last forward.
        has_followed: True if this rank has run out of batches in the current ``Join``.
    """

    def __init__(self) -> None:
        self.by_all = True
        self.active = 0
        self.has_followed = False


_joined: weakref.WeakSet[JoinedContainer] = weakref.WeakSet()
"""Containers that have been in a ``Join``. Weak, so that a container can be freed."""


def join_hook(container: JoinedContainer, by_all: bool) -> JoinHook:
    """Return the hook that ``Join`` calls on a rank that has run out of batches."""
    container.joining.by_all = by_all
    _joined.add(container)
    return _FollowingHook(container)


def agree_on_forward(container: JoinedContainer, sync: bool, buffers: bool) -> None:
    """Agree with the other ranks before a forward of this rank. Collective.

    Raises:
        RuntimeError: some ranks have run out, and another model of the same ``Join`` waits for its backward.
    """
    # a rank without batches follows a model's forward and backward together, so it would wait in the other backward
    for other in _joined - {container}:
        missed = other.joining.active < comm.world_size(other.process_group)
        if other._join_config.enable and other._watch.expected and missed:
            raise RuntimeError(
                f"join, rank {comm.rank(container.process_group)}: a forward of this model is between the forward and "
                "the backward of another model, and ranks without batches cannot follow that order. Wrap both models "
                "as one module, or run each model's backward before the next model's forward"
            )
    _apply_agreement(container, agree(container.process_group, container.device, True, sync, buffers))


def _apply_agreement(container: JoinedContainer, found: JoinAgreement) -> None:
    joining = container.joining
    joining.active = found.active
    if found.sync:
        container._compare("forward")
    container.reducer.divisor = comm.world_size(container.process_group) if joining.by_all else found.active
    if found.buffers:
        container._align_buffers(found.leader)


class _FollowingHook(JoinHook):
    """Hook that ``Join`` calls on a rank that has run out of batches."""

    def __init__(self, container: JoinedContainer) -> None:
        self._container = container
        super().__init__()

    def main_hook(self) -> None:
        """Take part in the collectives of the other ranks' forward and backward, with zero gradients."""
        container = self._container
        found = agree(container.process_group, container.device, False, False, False)
        _apply_agreement(container, found)
        if found.sync:
            # those of this rank's last batch have been averaged already
            _drop_gradients(container)
            # leaves the others' mean in `.grad`, by which an optimizer that joins as well steps
            container.skip_backward()
            container.joining.has_followed = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the last batch of all ranks, copy the model of the last rank that trained to all ranks."""
        container = self._container
        leader = agree(container.process_group, container.device, is_last_joiner, False, False).leader
        container.reducer.divisor = comm.world_size(container.process_group)
        container._authoritative_rank = leader  # torch's name for the rank whose weights all have
        container._join_config = _JoinConfig.construct_disabled_join_config()
        if container.joining.has_followed:
            container.joining.has_followed = False
            # the next backward would add to the others' mean
            _drop_gradients(container)
        broadcast_module_state(
            container.module,
            container.process_group,
            src=leader,
            ignored=container.parameters_to_ignore,
            buffers=container.forward_sync_buffers,
        )


def _drop_gradients(container: JoinedContainer) -> None:
    for name, parameter in container.module.named_parameters():
        if name not in container.parameters_to_ignore:
            parameter.grad = None
