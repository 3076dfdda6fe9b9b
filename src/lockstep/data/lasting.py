"""Batches that stay what they are while later ones are drawn, also where a loader writes all into the same memory."""

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
    """Draws batches that are held together, and copies those of a loader that uses their memory again.

    Whether it does shows in the first batches, before one of them is handed out: they are copied, and compared with
    what has become of them when the others were drawn.

    Attributes:
        copies: whether the loader is known to do so.
    """

    def __init__(self) -> None:
        self.copies = False
        self._lasting = 0  # so many batches, held together, have stayed what they were

    def draw(self, batches: Iterator[Held], held: list[Held], count: int) -> None:
        """Have so many batches in ``held``, or all that are left.

        Args:
            batches: as the loader gives them, with their weights.
            held: what was drawn before, and not handed out.
            count: of batches.
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
