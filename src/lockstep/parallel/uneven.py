"""Batches of different sizes and numbers: weighted means over ranks, and ranks that have run out (``join``)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from lockstep.ground import comm
from lockstep.ground.tree import tree_map
from lockstep.parallel.backward_watcher import find_tensors
from lockstep.parallel.consistency import broadcast_module_state

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
            self._total = torch.full((), weight, dtype=torch.float64, device=comm.carrier(group, device))
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

    def apply(self, outputs: Any) -> Any:
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


class Muster(NamedTuple):
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


def muster(group: comm.Group, device: torch.device, active: bool, sync: bool, buffers: bool) -> Muster:
    """Agree, in one message, on who is there and what comes.

    Args:
        group: all ranks call this at the same time, those that have joined, too.
        device: of the model.
        active: whether this rank has a batch; the rest counts only then.
        sync: whether its backward is to be synchronised.
        buffers: whether it takes buffers before its forward.
    """
    world = comm.world_size(group)
    marks = torch.zeros(world + 2, dtype=torch.int32)
    if active:
        marks[comm.rank(group)], marks[world], marks[world + 1] = 1, sync, buffers
    marks = marks.to(comm.carrier(group, device))
    if world > 1:
        dist.all_reduce(marks, group=group)
    found = marks.tolist()
    there = [rank for rank in range(world) if found[rank]]
    return Muster(len(there), there[-1] if there else 0, found[world] > 0, found[world + 1] > 0)


class Shadow(JoinHook):
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


class JoinsUneven(nn.Module, Joinable):
    """The part of `lockstep.parallel.ddp.DistributedDataParallel` that lets ranks have different numbers of batches."""

    module: nn.Module
    process_group: Any
    device: torch.device
    reducer: Any
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    skip_backward: Callable[[], None]
    _align_buffers: Callable[[int], None]
    _compare: Callable[[str], None]
    _watch: Any
    _joined: ClassVar[weakref.WeakSet[JoinsUneven]] = weakref.WeakSet()
    """Those that have been in a `join`."""

    def __init__(self) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._by_all = True  # divide by all ranks
        self._active = 0  # ranks that had batches in the last forward
        self._has_joined = False  # a join() was made
        self._has_followed = False  # this rank has run out in the present one

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context around a training loop in which ranks have different numbers of batches.

        A rank that has run out follows the others with nothing to add, and all end with the model of the last one
        that trained. One backward to each forward with gradients; no collectives of your own in the loop. Of several
        models in one ``Join``, each runs its backward before the next one's forward.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks; else by those that still have batches.
            enable: False to train without.
            throw_on_early_termination: have all ranks raise as soon as one has run out.

        Raises:
            RuntimeError: optimizers are sharded.
        """
        if enable and hasattr(self.reducer, "shards"):
            raise RuntimeError(
                "join() with sharded optimizers: a rank that has run out of batches would have to step, too; let it go "
                "on with any batch that does not count, under `with model.weight(0):`"
            )
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``torch.distributed.algorithms.Join`` calls on a rank that has run out.

        Args:
            divide_by_initial_world_size: as of `join`; default True.
        """
        self._by_all = kwargs.get("divide_by_initial_world_size", True)
        self._has_joined = True
        JoinsUneven._joined.add(self)
        return Shadow(self._follow, self._leave)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` communicates from."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that ``Join`` asks."""
        return self.process_group

    def _meet(self, found: Muster) -> None:
        self._active = found.active
        if found.sync:
            self._compare("forward")
        self.reducer.divisor = comm.world_size(self.process_group) if self._by_all else found.active
        if found.buffers:
            self._align_buffers(found.leader)

    def _follow(self) -> None:
        found = muster(self.process_group, self.device, False, False, False)
        self._meet(found)
        if found.sync:
            self._drop_gradients()  # of this rank's last batch, which have been averaged
            self.skip_backward()  # an optimizer that joins, too, steps with the others' mean
            self._has_followed = True

    def _leave(self, is_last_joiner: bool) -> None:
        leader = muster(self.process_group, self.device, is_last_joiner, False, False).leader
        self._authoritative_rank = leader
        self.reducer.divisor = comm.world_size(self.process_group)
        self._join_config = _JoinConfig.construct_disabled_join_config()
        if self._has_followed:
            self._has_followed = False
            self._drop_gradients()  # the others' mean, which this rank's next backward would add to
        broadcast_module_state(
            self.module,
            self.process_group,
            src=leader,
            ignored=self.parameters_to_ignore,
            buffers=self.forward_sync_buffers,
        )

    def _drop_gradients(self) -> None:
        for name, parameter in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                parameter.grad = None

    def _notify(self, sync: bool, buffers: bool) -> None:
        """Before a forward on a rank that has a batch.

        Raises:
            RuntimeError: some ranks have run out, and another model of the same ``Join`` waits for its backward, which
                they follow before they come here.
        """
        Join.notify_join_context(self)
        for other in JoinsUneven._joined - {self}:
            missed = other._active < comm.world_size(other.process_group)
            if other._join_config.enable and other._watch.expected and missed:
                raise RuntimeError(
                    f"join, rank {comm.rank(self.process_group)}: a forward of this model comes between the forward "
                    "and the backward of another one, where ranks without batches cannot follow: wrap both models as "
                    "one module, or run each one's backward before the next one's forward"
                )
        self._meet(muster(self.process_group, self.device, True, sync, buffers))
