"""Buffers and BatchNorm layers over the ranks: whose statistics a window begins with, and an evaluation runs with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.collectives import ReplicaMap, column_group
from lockstep.engines.ddp.consistency import sync_buffers
from lockstep.engines.ddp.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    synchronized_layers,
)
from lockstep.ground import comm

# -- synchronized BatchNorm ----------------------------------------------------------------------------------


class SynchronizedNorms:
    """For the length of a fit, the synchronized layers of its module: converted, and in a group of their own.

    They need one because a rank sends its buckets of gradients as they fill, which may be before or after a layer's
    message, while ranks may differ in what they use. On one group those messages would meet each other.

    Args:
        module: of the fit, alike on all ranks.
        convert: convert its BatchNorm layers; else only those that the user made synchronized count.
        group: the layers' group of an earlier fit of this run, if there was one.
        timeout: how long a layer waits for the other ranks.
        replicas: a layer meets those of one rank of each, so that each sample counts once.

    Attributes:
        layers: all synchronized layers.
        group: where they meet, unless the user gave them a group.
    """

    def __init__(
        self,
        module: nn.Module,
        convert: bool,
        group: comm.Group,
        timeout: timedelta,
        replicas: ReplicaMap,
    ) -> None:
        self._timeout = timeout
        own = {id(layer) for layer in synchronized_layers(module)}
        if convert:
            convert_sync_batchnorm(module)
        self.layers: list[SyncBatchNorm] = list(synchronized_layers(module))
        self._converted = [layer for layer in self.layers if id(layer) not in own]
        self._lent = [layer for layer in self.layers if layer.sync_group is None]
        self._present: dict[tuple[int, ...], dict[int, comm.Group]] = {}  # by the ranks without samples
        if self._lent and group is None:
            group = column_group(replicas, timeout)
            comm.barrier(group)  # who ends at once must not be gone while another still connects to it
        self.group = group
        for layer in self._lent:
            layer.sync_group = group

    @contextmanager
    def leaving_out(self, absent: tuple[int, ...]) -> Iterator[None]:
        """Inside, the layers meet without some ranks, which get the running statistics afterwards. Collective."""
        groups = [layer.sync_group for layer in self.layers]
        present = self._without(absent, groups)
        for layer, group in zip(self.layers, groups, strict=True):
            layer.sync_group, layer.partial = present[id(group)], True
        try:
            yield
        finally:
            for layer, group in zip(self.layers, groups, strict=True):
                layer.sync_group, layer.partial = group, False
        for group in {id(group): group for group in groups}.values():
            ranks = comm.ranks_of(group)
            first = next((place for place, rank in enumerate(ranks) if rank not in absent), None)
            if first is not None and not set(absent).isdisjoint(ranks):
                layers = [layer for layer in self.layers if layer.sync_group is group]
                comm.broadcast_tensors([buffer for layer in layers for buffer in layer.buffers()], first, group)

    def _without(self, absent: tuple[int, ...], groups: list[comm.Group]) -> dict[int, comm.Group]:
        """For each of the layers' groups (by its id) one without some ranks. Collective."""
        if absent not in self._present:
            wanted = {id(group): [r for r in comm.ranks_of(group) if r not in absent] for group in groups}
            # all ranks make all groups, in one order: a backend may need it
            of_all = sorted({tuple(ranks) for each in comm.all_gather_object(list(wanted.values())) for ranks in each})
            made = {ranks: dist.new_group(list(ranks), timeout=self._timeout) for ranks in of_all if ranks}
            mine = comm.rank()
            self._present[absent] = {
                id(group): made[tuple(wanted[id(group)])] if mine in wanted[id(group)] else group for group in groups
            }
        return self._present[absent]

    def set_zero_weight(self, zero_weight: bool) -> None:
        """Leave this rank's samples out of the statistics: they are a padding batch's."""
        for layer in self.layers:
            layer.zero_weight = zero_weight

    def others_buffers(self, module: nn.Module) -> list[Tensor]:
        """The buffers of ``module`` that no synchronized layer keeps alike on all ranks."""
        alike = {id(buffer) for layer in self.layers for buffer in layer.buffers()}
        return [buffer for buffer in module.buffers() if id(buffer) not in alike]

    def put_back(self) -> None:
        """Make the layers what they were."""
        self.set_zero_weight(False)
        for layer in self._lent:
            layer.sync_group = None
        for layer in self._converted:
            revert_sync_batchnorm(layer)


# -- buffers of a window -------------------------------------------------------------------------------------


class WindowBuffers:
    """A module's buffers, which each rank's forwards change by its own samples until the window's end.

    Args:
        module: of the fit.

    Attributes:
        differ: whether training forwards have changed them since the ranks had rank 0's.
        due: whether a window has ended since, so that the next training forward takes rank 0's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.differ = self.due = False
        self._module = module
        self._own: dict[str, Tensor] | None = None  # while rank 0's are shown within a window

    def align(self) -> None:
        """Take rank 0's, if they differ. Collective then."""
        if self.differ:
            sync_buffers(self._module, None)
            self.differ = self.due = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, every rank has rank 0's. Within a window each has its own again afterwards. Collective."""
        if self.due or not self.differ:
            self.align()
            yield
            return
        self._own = self._copies()
        sync_buffers(self._module, None)
        versions = {name: buffer._version for name, buffer in self._module.named_buffers()}
        try:
            yield
        finally:
            own, self._own = self._own, None
            for name, buffer in self._module.named_buffers():
                if buffer._version == versions.get(name):  # what an evaluation has changed is what it says now
                    _put(buffer, own[name])

    def held(self) -> dict[str, Tensor]:
        """This rank's own, by name, where a window is under way; else rank 0's are all that is needed."""
        return {} if self.due or not self.differ else self._own or self._copies()

    def hold(self, saved: dict[str, Tensor]) -> None:
        """Put back what `held` gave."""
        buffers = dict(self._module.named_buffers())
        for name, value in saved.items():
            _put(buffers[name], value)
            self.differ = True

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}


@torch.no_grad()
def _put(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
