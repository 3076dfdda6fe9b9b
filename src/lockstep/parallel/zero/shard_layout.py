"""Where the ranks' slices of a bucket lie: pure functions from sizes to places.

A bucket's buffer is padded so that all ranks' slices are of one length, and cut without regard to parameters: a
parameter may lie in several slices. What a rank has of it is its *fragment*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STEP = 128
"""Bytes at whose multiples slices, and parameters in a bucket, begin.

Vectorised kernels take 128 bytes at a time and the rest of a tensor element by element, in code that may round
otherwise. Cut at their multiples, an element comes to the same code as in the whole parameter, and gets its bits.
"""


class Fragment(NamedTuple):
    """What a slice has of a parameter, in elements in the order of memory."""

    start: int
    """Its first element, counted within the parameter."""
    stop: int
    """Behind its last one; ``start`` where the slice has nothing of the parameter."""
    offset: int
    """Where it begins, counted within the bucket."""


def padded(length: int, itemsize: int, world: int) -> int:
    """The smallest length of at least ``length`` elements that ``world`` slices can share.

    Example:
        >>> padded(100, 4, 2), padded(64, 4, 2), padded(0, 4, 2)
        (128, 64, 0)
    """
    unit = max(1, STEP // itemsize) * world
    return -(-length // unit) * unit


def fragments(starts: Sequence[int], numels: Sequence[int], begin: int, end: int) -> list[Fragment]:
    """What the slice from ``begin`` to ``end`` of a bucket has of each of its parameters.

    Args:
        starts: where each parameter begins in the bucket.
        numels: elements of each.
        begin, end: of the slice.

    Example:
        >>> fragments([0, 64], [60, 100], begin=32, end=128)
        [Fragment(start=32, stop=60, offset=32), Fragment(start=0, stop=64, offset=64)]
    """
    found = []
    for first, numel in zip(starts, numels, strict=True):
        start = min(max(begin - first, 0), numel)
        stop = max(min(end - first, numel), start)
        found.append(Fragment(start, stop, first + start))
    return found
