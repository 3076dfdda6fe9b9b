"""Uneven numbers of batches: what a rank that has run out does while others train on (torch's ``Join``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from lockstep.ground import comm
from lockstep.parallel.start import broadcast_module_state


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
