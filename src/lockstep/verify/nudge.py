"""Moves one sample a little, and notes what that changes for the others: does a loss compare samples?"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.verify.recordings import Event
from lockstep.verify.watch import Watch

STILL, NUDGED = "rows still", "rows nudged"
"""The overrides that have the gradients of all samples but the first noted: as it is, and with the first one moved."""

_STEP = 1e-3
"""By how much the first sample is moved, as part of its mean size."""
_SAME = 1e-12


class Nudge:
    """Watches the outputs of the innermost modules in the first forward of a run.

    The first of these outputs is moved in its first row. What comes back by the backward for the other rows stays the
    same where each sample has a loss of its own, whatever that is divided by.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._moves = NUDGED in watch.settings.overrides
        self._sees = self._moves or STILL in watch.settings.overrides
        self._number = 0

    def after(self, module: nn.Module, output: object) -> Tensor | None:
        """The output that a module is to have in place of its own; None where it stays."""
        if not self._sees or self.watch.updates or self.watch.backwards or not _has_rows(output):
            return None
        if next(module.children(), None) is not None:
            return None
        assert isinstance(output, Tensor)
        moved = output
        if self._moves and not self._number:
            step = torch.zeros_like(output)
            step[0] = _STEP * output.detach()[0].abs().mean()
            moved = output + step
        moved.register_hook(functools.partial(self._note, self._number))
        self._number += 1
        return moved

    def _note(self, number: int, gradient: Tensor) -> None:
        rows = gradient.detach()[1:].double().flatten(1)
        self.watch.journal.note("rows", number=number, sums=rows.sum(1).tolist(), sizes=rows.abs().sum(1).tolist())


def _has_rows(output: object) -> bool:
    return isinstance(output, Tensor) and output.requires_grad and output.dim() > 1 and len(output) > 1


def compares_samples(still: Sequence[Event], nudged: Sequence[Event]) -> bool | None:
    """Whether the other samples' gradients follow the first sample; None where they were not seen."""
    if not still or len(still) != len(nudged):
        return None
    for own, other in zip(still, nudged, strict=True):
        for kind in ("sums", "sizes"):
            for a, b, size in zip(own[kind], other[kind], own["sizes"], strict=True):
                if abs(a - b) > _SAME * size:
                    return True
    return False
