"""Groups of tensors that are copied or sent as one: a small tensor costs as much as a large one to send by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

ALONE = 2**20
"""Bytes from which on a tensor is a group of its own: to copy it beside others would cost what is saved."""


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor, as a kind for `grouped`."""
    return tensor.dtype


def grouped(
    tensors: Sequence[Tensor], max_bytes: int, kind: Callable[[Tensor], Hashable] = dtype_of
) -> Iterator[list[int]]:
    """Group tensors of one kind, in their order, into groups of at most ``max_bytes``.

    A tensor of `ALONE` bytes or more is a group of its own, and so is one that is not strided (a sparse one). The
    groups depend on kinds and sizes alone, so that ranks with equal tensors make equal groups, in one order.

    Args:
        tensors: what is grouped.
        max_bytes: of the tensors of a group together.
        kind: what the tensors of a group have in common.

    Yields:
        the indices of a group's tensors. Each index comes once.

    Example:
        >>> tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4), torch.ones(2)]
        >>> list(grouped(tensors, max_bytes=28))
        [[0, 2], [3], [1]]
    """
    alike: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(kind(tensor), []).append(index)
    for indices in alike.values():
        group: list[int] = []
        size = 0
        for index in indices:
            tensor = tensors[index]
            if tensor.layout is not torch.strided or tensor.nbytes >= ALONE:
                yield [index]
                continue
            if group and size + tensor.nbytes > max_bytes:
                yield group
                group, size = [], 0
            group.append(index)
            size += tensor.nbytes
        if group:
            yield group
