"""Batches of different sizes and numbers: weighted means over ranks, and ranks that have run out (``join``)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    """``n`` as a float.

    Raises:
        ValueError: it is no number of samples.
    """
    weight = float(n)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"weight({n}) on rank {rank}: give what this rank's batch counts, 0 or more (its samples, say)"
        )
    return weight


class Weight:
    """The weight of one forward, and what its gradients are multiplied by; made on every rank at the same time.

    Args:
        weight: of this rank's batch.
        group: the ranks.
        device: of the model.
        naming: gives a context in which it is said which rank was not there.
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
            # not `torch.tensor`, for which a GPU would be waited for
            by = comm.carrier(group, device)
            self._total = torch.full((), weight, dtype=widest(by), device=by)
            self._work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def factor(self) -> Tensor | float:
        """The weight times the number of ranks over the sum of all weights, 1 where all are equal."""
        if self._world == 1:
            return 1.0
        if self._factor is None:
            with self._naming("adding up the weights"):
                self._work.wait()
            self._factor = self.weight * self._world / self._total
        return self._factor

    def apply(self, outputs: object) -> Any:
        """``outputs`` with the same values, whose gradients are multiplied by `factor` on their way back.

        Raises:
            TypeError: there is a tensor in an object that is neither a collection nor a dataclass.
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
                f"weight(): the model returned a {type(outputs).__name__} with tensors in the attributes of an object; "
                "return them in a tuple, list, dict or dataclass, so that their gradients can be weighed"
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
        # 0 times inf is NaN, and what a batch of weight 0 gives may be anything
        return (grad * weight.factor() if weight.weight else torch.zeros_like(grad)), None


# -- join ----------------------------------------------------------------------------------------------------


class JoinAgreement(NamedTuple):
    """What all ranks have agreed on before a forward.

    Attributes:
        active: number of ranks that still have batches.
        leader: the last of them, whose buffers all take.
        sync: whether a synchronised backward follows.
        buffers: whether buffers are taken first.
    """

    active: int
    leader: int
    sync: bool
    buffers: bool


def agree(group: comm.Group, device: torch.device, active: bool, sync: bool, buffers: bool) -> JoinAgreement:
    """Agree, in one message, on who is there and what comes.

    Args:
        group: all ranks call this at the same time, those that have joined, too.
        device: of the model.
        active: whether this rank has a batch; the rest counts only then.
        sync: whether its backward is to be synchronised.
        buffers: whether it takes buffers before its forward.
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


class FollowingHook(JoinHook):
    """What ``Join`` calls on a rank that has run out of batches.

    Args:
        follow: takes part in what the others do in a forward and its backward, with nothing to add.
        leave: takes the model of the last rank that trained; told whether this is it.
    """

    def __init__(self, follow: Callable[[], None], leave: Callable[[bool], None]) -> None:
        self._follow = follow
        self._leave = leave
        super().__init__()

    def main_hook(self) -> None:
        """Once for each forward of the others."""
        self._follow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """When nobody has a batch any more."""
        self._leave(is_last_joiner)


class JoinedContainer(Protocol):
    """What a join asks of a `DistributedDataParallel`."""

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
        """What averages the gradients."""
        ...

    def skip_backward(self) -> None:
        """In place of a backward: take part in the others'."""
        ...

    def _align_buffers(self, src: int) -> None: ...

    def _compare(self, stage: str) -> None: ...


class JoinState:
    """A container's part in a ``Join``.

    Attributes:
        by_all: divide gradients by all ranks; else by those that still have batches.
        active: ranks that had batches in the last forward.
        has_followed: this rank has run out in the present one.
    """

    def __init__(self) -> None:
        self.by_all = True
        self.active = 0
        self.has_followed = False


_joined: weakref.WeakSet[JoinedContainer] = weakref.WeakSet()
"""Containers that have been in a ``Join``."""


def join_hook(container: JoinedContainer, by_all: bool) -> JoinHook:
    """What ``Join`` calls on a rank that has run out."""
    container.joining.by_all = by_all
    _joined.add(container)
    return FollowingHook(partial(_follow, container), partial(_leave, container))


def meet(container: JoinedContainer, sync: bool, buffers: bool) -> None:
    """Before a forward on a rank that has a batch: agree on who is there and what comes.

    Raises:
        RuntimeError: some ranks have run out, and another model of the same ``Join`` waits for its backward, which
            they follow before they come here.
    """
    for other in _joined - {container}:
        missed = other.joining.active < comm.world_size(other.process_group)
        if other._join_config.enable and other._watch.expected and missed:
            raise RuntimeError(
                f"join, rank {comm.rank(container.process_group)}: a forward of this model comes between the forward "
                "and the backward of another one, where ranks without batches cannot follow: wrap both models as "
                "one module, or run each one's backward before the next one's forward"
            )
    _meet(container, agree(container.process_group, container.device, True, sync, buffers))


def _meet(container: JoinedContainer, found: JoinAgreement) -> None:
    joining = container.joining
    joining.active = found.active
    if found.sync:
        container._compare("forward")
    container.reducer.divisor = comm.world_size(container.process_group) if joining.by_all else found.active
    if found.buffers:
        container._align_buffers(found.leader)


def _follow(container: JoinedContainer) -> None:
    found = agree(container.process_group, container.device, False, False, False)
    _meet(container, found)
    if found.sync:
        _drop_gradients(container)  # of this rank's last batch, which have been averaged
        container.skip_backward()  # an optimizer that joins, too, steps with the others' mean
        container.joining.has_followed = True


def _leave(container: JoinedContainer, is_last_joiner: bool) -> None:
    leader = agree(container.process_group, container.device, is_last_joiner, False, False).leader
    container.reducer.divisor = comm.world_size(container.process_group)
    container._authoritative_rank = leader  # torch's name of whose weights all have now
    container._join_config = _JoinConfig.construct_disabled_join_config()
    if container.joining.has_followed:
        container.joining.has_followed = False
        _drop_gradients(container)  # the others' mean, which this rank's next backward would add to
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
