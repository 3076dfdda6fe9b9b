"""Synchronization of buffers and BatchNorm layers between ranks, in training and for evaluations."""

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
    """Manager of a module's synchronized BatchNorm layers in a fit: converts layers and sets their process groups.

    Args:
        module: module of the fit, the same on all ranks.
        convert: also convert plain BatchNorm layers; otherwise only layers that the user has synchronized count.
        group: the layers' process group from an earlier fit of this run; None: create one.
        timeout: how long a layer waits for the other ranks.
        replicas: mapping from ranks to replicas; layers communicate with one rank per replica, so that each sample
            counts once.

    Attributes:
        layers: all synchronized layers.
        group: process group of the layers, except of layers for which the user chose one.
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
        self._without_group = [layer for layer in self.layers if layer.sync_group is None]
        self._present: dict[tuple[int, ...], dict[int, comm.Group]] = {}  # by the ranks without samples
        if self._without_group and group is None:
            # A separate group: a rank sends its buckets of gradients as they fill, before or after a layer's
            # message, and ranks may use different parameters. On one group those messages would be confused.
            group = column_group(replicas, timeout)
            comm.barrier(group)  # a rank that ends at once must still exist while another connects to it
        self.group = group
        for layer in self._without_group:
            layer.sync_group = group

    @contextmanager
    def without_ranks(self, absent: tuple[int, ...]) -> Iterator[None]:
        """Inside the block, exclude ``absent`` ranks from the layers. Afterwards, send them the running statistics.

        Collective, also for the absent ranks.
        """
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
        """Return {id of a group in ``groups``: process group without the ``absent`` ranks}. Collective."""
        if absent not in self._present:  # a group costs connections: it is made once for each set of absent ranks
            wanted = {id(group): [r for r in comm.ranks_of(group) if r not in absent] for group in groups}
            # all ranks make all groups, in one order, which `new_group` requires
            of_all = sorted({tuple(ranks) for each in comm.all_gather_object(list(wanted.values())) for ranks in each})
            made = {ranks: dist.new_group(list(ranks), timeout=self._timeout) for ranks in of_all if ranks}
            mine = comm.rank()
            self._present[absent] = {
                id(group): made[tuple(wanted[id(group)])] if mine in wanted[id(group)] else group for group in groups
            }
        return self._present[absent]

    def set_zero_weight(self, zero_weight: bool) -> None:
        """If ``zero_weight`` is True, exclude this rank's samples from the statistics, as for a padding batch."""
        for layer in self.layers:
            layer.zero_weight = zero_weight

    def others_buffers(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers of ``module`` that are not in synchronized layers, and so may differ between ranks."""
        synchronized = {id(buffer) for layer in self.layers for buffer in layer.buffers()}
        return [buffer for buffer in module.buffers() if id(buffer) not in synchronized]

    def restore(self) -> None:
        """Restore the layers' original classes and process groups."""
        self.set_zero_weight(False)
        for layer in self._without_group:
            layer.sync_group = None
        for layer in self._converted:
            revert_sync_batchnorm(layer)


# -- buffers of a window -------------------------------------------------------------------------------------


class WindowBuffers:
    """Synchronizer of a module's buffers. Within a window, each rank updates its own; then all ranks use rank 0's.

    Args:
        module: module of the fit.

    Attributes:
        differ: True if training forwards have changed the buffers since they were last set to rank 0's.
        due: True if a window has ended since then, so that the next training forward starts with rank 0's buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.differ = self.due = False
        self._module = module
        self._own: dict[str, Tensor] | None = None  # this rank's, while rank 0's replace them within a window

    def align(self) -> None:
        """If the buffers may differ between ranks, overwrite them with rank 0's. The call is then collective."""
        if self.differ:
            sync_buffers(self._module, None)
            self.differ = self.due = False

    @contextmanager
    def rank_0_values(self) -> Iterator[None]:
        """Use rank 0's buffers inside the block. Within a window, restore this rank's own at the end. Collective."""
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
                if buffer._version == versions.get(name):  # a change by an evaluation stays
                    _put(buffer, own[name])

    def window_state(self) -> dict[str, Tensor]:
        """Return {name: buffer} of this rank within a window; {} between windows, when all ranks use rank 0's."""
        return {} if self.due or not self.differ else self._own or self._copies()

    def load_window_state(self, saved: dict[str, Tensor]) -> None:
        """Restore the buffers that `window_state` returned."""
        buffers = dict(self._module.named_buffers())
        for name, value in saved.items():
            _put(buffers[name], value)
            self.differ = True

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}


@torch.no_grad()
def _put(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
