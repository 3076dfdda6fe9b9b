"""Batches that stay valid while later ones are drawn, even if a loader reuses their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.ground.comm import as_bytes
from lockstep.ground.tree import tree_leaves, tree_map

Held = tuple[Any, float]
"""A batch and its weight."""
ARRAYS = (Tensor, np.ndarray)


class LastingBatches:
    """A buffer of drawn batches that copies those of a loader that reuses their memory.

    The first batches show whether it does: they are copied before one of them is handed out, and compared with the
    originals after the others were drawn.

    Attributes:
        copies: True if the loader is known to reuse memory.
    """

    def __init__(self) -> None:
        self.copies = False
        self._lasting = 0  # this many buffered batches have stayed unchanged

    def draw(self, batches: Iterator[Held], held: list[Held], count: int) -> None:
        """Fill ``held`` up to ``count`` batches, or with all that are left.

        Args:
            batches: the loader's batches with their weights.
            held: batches that were drawn before and not handed out yet.
            count: number of batches wanted.
        """
        drawn = itertools.islice(batches, max(0, count - len(held)))
        if self.copies:
            held.extend((tree_map(_copy, batch, ARRAYS), weight) for batch, weight in drawn)
        elif self._lasting >= count:
            held.extend(drawn)
        else:
            self._draw_and_compare(drawn, held)
            self._lasting = max(self._lasting, len(held))

    def _draw_and_compare(self, drawn: Iterator[Held], held: list[Held]) -> None:
        copies = [(tree_map(_copy, batch, ARRAYS), weight) for batch, weight in held]
        for batch, weight in drawn:
            held.append((batch, weight))
            copies.append((tree_map(_copy, batch, ARRAYS), weight))
        if any(_differ(given, copy) for (given, _), (copy, _) in zip(held, copies, strict=True)):
            self.copies = True
            held[:] = copies


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.copy()
    strided = array.layout is torch.strided and not array.is_nested and array.device.type != "meta"
    return array.clone() if strided and not array.requires_grad else array


def _differ(given: object, copy: object) -> bool:
    pairs = zip(tree_leaves(given, ARRAYS), tree_leaves(copy, ARRAYS), strict=True)
    return any(one is not other and _bytes(one) != _bytes(other) for one, other in pairs)


def _bytes(array: Any) -> bytes:
    if isinstance(array, Tensor):
        array = as_bytes(array.detach().as_subclass(Tensor).cpu().contiguous()).numpy()
    return bytes(array.tobytes())
