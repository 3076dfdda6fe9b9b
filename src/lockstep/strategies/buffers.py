"""Buffers (BatchNorm statistics, say) over the ranks: a window begins, and an evaluation runs, with those of rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.start import sync_buffers


class WindowBuffers:
    """A module's buffers, which each rank's forwards change by its own samples until the window's end.

    Args:
        module: of the fit.

    Attributes:
        differ: whether training forwards have changed them since the ranks had rank 0's.
        due: whether a window has ended since, so that the next training forward takes rank 0's.
    """

    def __init__(self, module: Any) -> None:
        self.differ = self.due = False
        self._module = module
        self._own: dict[str, Tensor] | None = None  # while rank 0's are shown within a window

    def align(self) -> None:
        """Take rank 0's, if they differ. Collective then."""
        if self.differ:
            sync_buffers(self._module, None)
            self.differ = self.due = False

    def may_be_others(self) -> None:
        """Buffers may have been replaced (``load_state_dict(assign=True)``): each rank's are its own until aligned."""
        if not self.differ:  # no forward since the ranks had rank 0's: this is a window's beginning
            self.differ = self.due = True

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
