"""The BatchNorm layers of a fit that take their statistics over all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    synchronized_layers,
)


class SynchronizedNorms:
    """For the length of a fit, the synchronized layers of its module: converted, and in a group of their own.

    They need one because a rank sends its buckets of gradients as they fill, which may be before or after a layer's
    message, while ranks may differ in what they use. On one group those messages would meet each other.

    Args:
        module: of the fit, alike on all ranks.
        convert: convert its BatchNorm layers; else only those that the user made synchronized count.
        group: the layers' group of an earlier fit of this run, if there was one.
        timeout: how long a layer waits for the other ranks.

    Attributes:
        layers: all synchronized layers.
        group: where they meet, unless the user gave them a group.
    """

    def __init__(self, module: Any, convert: bool, group: Any, timeout: timedelta) -> None:
        self._convert, self._timeout = convert, timeout
        self.group = group
        self.layers: list[SyncBatchNorm] = []
        self._converted: list[SyncBatchNorm] = []
        self._lent: list[SyncBatchNorm] = []
        self.take_in(module)

    def take_in(self, module: Any) -> None:
        """Synchronize the layers that ``module`` has now; the others no longer count. Collective."""
        known = {id(layer) for layer in self.layers}
        own = {id(layer) for layer in synchronized_layers(module)}
        if self._convert:
            convert_sync_batchnorm(module)
        self.layers = list(synchronized_layers(module))
        late = [layer for layer in self.layers if id(layer) not in known]
        self._converted += [layer for layer in late if id(layer) not in own]
        lent = [layer for layer in late if layer.sync_group is None]
        if lent and self.group is None:
            self.group = dist.new_group(timeout=self._timeout)
            comm.barrier(self.group)  # who ends at once must not be gone while another still connects to it
        for layer in lent:
            layer.sync_group = self.group
        self._lent += lent

    def mute(self, muted: bool) -> None:
        """Leave this rank's samples out of the statistics: they are borrowed."""
        for layer in self.layers:
            layer.muted = muted

    def others_buffers(self, module: Any) -> list[Tensor]:
        """The buffers of ``module`` that no synchronized layer keeps alike on all ranks."""
        alike = {id(buffer) for layer in self.layers for buffer in layer.buffers()}
        return [buffer for buffer in module.buffers() if id(buffer) not in alike]

    def put_back(self) -> None:
        """Make the layers what they were."""
        self.mute(False)
        for layer in self._lent:
            layer.sync_group = None
        for layer in self._converted:
            revert_sync_batchnorm(layer)
