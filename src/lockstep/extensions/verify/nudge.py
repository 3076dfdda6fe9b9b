"""Test for losses that compare samples: move one sample a little, and see whether gradients of others change."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.extensions.verify.recordings import Event
from lockstep.extensions.verify.watch import Watch

STILL, NUDGED = "rows still", "rows nudged"
"""Overrides that note the gradients of all samples but the first: as they are, and with the first sample moved."""

_STEP = 1e-3
"""How far the first sample is moved, as a fraction of its mean size."""
_ROUNDING = 1e-12


def moved(value: Tensor) -> Tensor:
    """Return values with the first row moved. Whole numbers (labels, masks, counts) stay."""
    step = torch.zeros_like(value)
    own = value.detach()[0]
    if not torch.equal(own, own.round()):
        step[0] = _STEP * own.abs().mean()
    return value + step


def moved_batch(batch: Any) -> Any:
    """Return a batch with its first sample moved."""
    return tree_map(lambda leaf: moved(leaf) if _has_rows(leaf) else leaf, batch)


class Nudge:
    """Hook that moves the first row of modules' outputs, and notes the other rows' gradients in the first backward.

    These stay the same if each sample has a loss of its own, whatever that is divided by.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._moves = NUDGED in watch.settings.overrides
        self._is_active = self._moves or STILL in watch.settings.overrides
        self._number = 0

    def after(self, module: nn.Module, output: object) -> Tensor | None:
        """Return the output that replaces an innermost module's own; None to keep it."""
        if not self._is_active or self.watch.updates or self.watch.backwards or not _has_rows(output):
            return None
        if next(module.children(), None) is not None:
            return None
        assert isinstance(output, Tensor)
        result = moved(output) if self._moves else output
        if result.requires_grad:
            result.register_hook(functools.partial(self._note, self._number))
            self._number += 1
        return result

    def _note(self, number: int, gradient: Tensor) -> None:
        rows = gradient.detach()[1:].double().flatten(1)
        self.watch.journal.note("rows", number=number, sums=rows.sum(1).tolist(), sizes=rows.abs().sum(1).tolist())


def _has_rows(output: object) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1 and len(output) > 1


def compares_samples(still: Sequence[Event], nudged: Sequence[Event]) -> bool | None:
    """Return True if other samples' gradients depend on the first sample; None if none or unequally many were noted."""
    if not still or len(still) != len(nudged):
        return None
    for own, other in zip(still, nudged, strict=True):
        for kind in ("sums", "sizes"):
            for a, b, size in zip(own[kind], other[kind], own["sizes"], strict=True):
                if abs(a - b) > _ROUNDING * size:
                    return True
    return False
