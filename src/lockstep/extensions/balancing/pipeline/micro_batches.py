"""Division of a batch into micro-batches of equal size. The last one is padded with copies of its last sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.tree import tree_leaves, tree_map

CANNOT_BE_CUT = (
    "BalancedStrategy(micro_batches={count}): the batch cannot be split into micro-batches: {why}. The first dimension "
    "of each tensor must be the samples. Or use micro_batches=1 and accumulate_grad_batches=N."
)


@dataclass(frozen=True)
class BatchPart:
    """A micro-batch of a pipeline, without and with padding to the size of the other micro-batches.

    Attributes:
        batch: its samples.
        filled: its samples, with the last one repeated up to the size of the other micro-batches.
        samples: number of samples in ``batch``; None: the batch was not split.
        rows: number of samples of ``filled``; None: the batch was not split.
        part: its samples as a fraction of the batch.
    """

    batch: Any
    filled: Any
    samples: int | None
    rows: int | None
    part: float


def cut(batch: Any, count: int) -> list[BatchPart]:
    """Split a batch into ``count`` micro-batches, or fewer if the batch has fewer samples.

    Args:
        batch: tensors, lists and tuples whose first dimension is the samples. Numbers, texts and tensors without
            dimensions are part of each micro-batch.
        count: above 0; 1: the batch as it is, of any type.

    Raises:
        MisconfigurationException: tensors differ in their first dimension, or there are none.

    Example:
        >>> [(part.samples, part.rows) for part in cut(torch.arange(10), 4)]
        [(3, 3), (3, 3), (3, 3), (1, 3)]
    """
    if count == 1:
        return [BatchPart(batch, batch, None, None, 1.0)]
    sizes = {each.shape[0] for each in tree_leaves(batch, Tensor) if each.ndim}
    if len(sizes) != 1:
        why = f"its tensors have {sorted(sizes)} samples" if sizes else "it has no tensor"
        raise MisconfigurationException(CANNOT_BE_CUT.format(count=count, why=why))
    size = sizes.pop()
    if not size:
        raise MisconfigurationException(CANNOT_BE_CUT.format(count=count, why="it has no samples"))
    rows = -(-size // count)
    parts = []
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        part = _slice(batch, size, itemgetter(slice(start, stop)))
        filled = part if stop - start == rows else _slice(part, stop - start, partial(_fill, rows=rows))
        parts.append(BatchPart(part, filled, stop - start, rows, (stop - start) / size))
    return parts


def _slice(batch: Any, size: int, take: Callable[[Any], Any]) -> Any:
    """Apply ``take`` to a batch's tensors, and to lists and tuples of ``size`` entries that contain no tensors."""

    def of_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return take(value) if value.ndim else value
        # a list without tensors, such as of texts, has samples if its length fits; a named tuple has fields
        if not any(True for _ in tree_leaves(value, Tensor)):
            return take(value) if len(value) == size and not hasattr(value, "_fields") else value
        items = [tree_map(of_leaf, item, (Tensor, list, tuple)) for item in value]
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)

    return tree_map(of_leaf, batch, (Tensor, list, tuple))


def _fill(value: Any, rows: int) -> Any:
    missing = rows - len(value)
    if isinstance(value, Tensor):
        return torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
    return type(value)([*value, *[value[-1]] * missing])
