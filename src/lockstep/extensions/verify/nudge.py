"""Test for losses that compare samples: one sample is changed slightly, and other samples' gradients are compared."""

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
"""Overrides that record all samples' gradients except the first one's, without and with moving the first sample."""

_STEP = 1e-3
"""Distance by which the first sample is moved, as a fraction of its mean absolute value."""
_ROUNDING = 1e-12


def move(value: Tensor) -> Tensor:
    """Return ``value`` with its first row shifted slightly, unless the row has only whole numbers (labels, masks)."""
    step = torch.zeros_like(value)
    own = value.detach()[0]
    if not torch.equal(own, own.round()):
        step[0] = _STEP * own.abs().mean()
    return value + step


def move_batch(batch: Any) -> Any:
    """Return a batch whose first sample is shifted slightly."""
    return tree_map(lambda leaf: move(leaf) if _has_rows(leaf) else leaf, batch)


class Nudge:
    """Hook that shifts the first sample's outputs, and records other samples' gradients in the first backward.

    The gradients do not change if the loss is a sum over samples, whatever divides it.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._moves = NUDGED in watch.settings.overrides
        self._is_active = self._moves or STILL in watch.settings.overrides
        self._number = 0

    def after(self, module: nn.Module, output: object) -> Tensor | None:
        """Return the output to use in place of an innermost module's ``output``, or None to leave it unchanged."""
        if not self._is_active or self.watch.updates or self.watch.backwards or not _has_rows(output):
            return None
        if next(module.children(), None) is not None:
            return None
        assert isinstance(output, Tensor)
        result = move(output) if self._moves else output
        if result.requires_grad:
            result.register_hook(functools.partial(self._record, self._number))
            self._number += 1
        return result

    def _record(self, number: int, gradient: Tensor) -> None:
        rows = gradient.detach()[1:].double().flatten(1)
        self.watch.journal.record("rows", number=number, sums=rows.sum(1).tolist(), sizes=rows.abs().sum(1).tolist())


def _has_rows(output: object) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1 and len(output) > 1


def compares_samples(still: Sequence[Event], nudged: Sequence[Event]) -> bool | None:
    """Return True if the gradients of other samples changed when the first sample was shifted.

    Return None if no gradients were recorded, or their numbers differ.
    """
    if not still or len(still) != len(nudged):
        return None
    for own, other in zip(still, nudged, strict=True):
        for kind in ("sums", "sizes"):
            for a, b, size in zip(own[kind], other[kind], own["sizes"], strict=True):
                if abs(a - b) > _ROUNDING * size:
                    return True
    return False
