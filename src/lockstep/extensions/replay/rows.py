"""Selection of single samples from a collated batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.tree import tree_map


class NoRows(ValueError):
    """Error for a batch from which single samples cannot be taken."""


def take(batch: Any, rows: Sequence[int], size: int) -> Any:
    """Return a batch with only the samples ``rows`` of a batch.

    Tensors whose first dimension is ``size`` are indexed, and so are lists of ``size`` objects. A list or tuple whose
    items are batched themselves, such as ``[inputs, labels]``, keeps its items.

    Args:
        batch: tensors in nested dicts, lists, tuples and dataclasses.
        rows: indices of the samples.
        size: number of samples in the batch.

    Raises:
        NoRows: nothing in the batch has ``size`` items.

    Example:
        >>> take({"text": ["a", "b", "c"], "scale": 2.0}, [0, 2], 3)
        {'text': ['a', 'c'], 'scale': 2.0}
    """
    found = False

    def of(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Tensor):
            if not value.ndim or len(value) != size:
                return value
            found = True
            return value[torch.tensor(list(rows), device=value.device)]
        if not isinstance(value, (list, tuple)):
            return tree_map(of, value, (Tensor, list, tuple))
        if len(value) == size and not _all_batched(value, size):
            found = True
            return type(value)([value[row] for row in rows])
        items = [of(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    taken = of(batch)
    if not found:
        raise NoRows(f"the batch ({type(batch).__name__}) has no tensor or list of {size} items, its number of samples")
    return taken


def _all_batched(items: Sequence[Any], size: int) -> bool:
    return bool(items) and all(_is_batched(item, size) for item in items)


def _is_batched(value: Any, size: int) -> bool:
    """Return True if a value has one item for each sample, or contains only such values."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == size
    if isinstance(value, Mapping):
        return bool(value) and all(_is_batched(item, size) for item in value.values())
    return isinstance(value, (list, tuple)) and (len(value) == size or _all_batched(value, size))
