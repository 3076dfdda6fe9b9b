"""A window: the micro-batches of one optimizer step on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import not_
from typing import Any

from lockstep.data.weighing import Part

_END = object()


class Window:
    """The micro-batches of one optimizer step on this rank; can be iterated once.

    Iterating yields (batch, weight, share). ``weight`` is the number of samples drawn for the micro-batch. It is 0.0
    if this rank's part is empty; the batch is then None or a padding batch. ``share`` is the factor of its loss that
    makes the average over the ranks of the sum over the window the mean over all samples of the window:
    weight x ranks / (sum of the weights of all ranks and micro-batches).

    Attributes:
        size: number of micro-batches that are left, the same on all ranks.
        begun: micro-batches of this window that an earlier attempt of the run has done.
        last: True for the last window of the epoch.
        absent: for each micro-batch, the ranks with an empty part; None if no part of the window is empty.
        of_rank: each rank's samples in the window.
        gap: (rank, loader) for a rank that has samples of a micro-batch but none of that loader; None if there is none.
    """

    __slots__ = ("_among", "_batches", "_parts", "absent", "begun", "gap", "last", "of_rank", "size")

    def __init__(
        self,
        batches: Iterator[Any],
        parts: Sequence[Part],
        last: bool,
        of_rank: Sequence[float],
        begun: int = 0,
        absent: Sequence[tuple[int, ...]] | None = None,
        among: Callable[[Sequence[int] | None], Sequence[Part]] | None = None,
        gap: tuple[int, int] | None = None,
    ) -> None:
        self.gap, self.of_rank = gap, of_rank
        self.absent = absent[begun:] if absent is not None and any(absent) else None
        self._batches = batches
        self._parts = parts[begun:] if begun else parts
        self.size = len(parts) - begun
        self.begun = begun
        self.last = last
        self._among = among  # returns the parts for a subset of averaging ranks; None: all weights are equal

    def share_among(self, ranks: Sequence[int]) -> None:
        """Average gradients over these ranks only (including this one): to the mean over their samples."""
        if self._among is not None:
            self._parts = self._among(ranks)[self.begun :]

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        batches = self._batches
        for weight, share in self._parts:
            batch = next(batches, _END)
            if batch is _END:
                raise RuntimeError("A training loader ended before the length that it had given (its `len()`).")
            yield batch, weight, share


def empty_ranks(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose part has no weight. Loops over all ranks run inside Python's built-in functions."""
    return tuple(itertools.compress(itertools.count(), map(not_, weights))) if 0 in weights else ()


def first_gap(of_parts: Sequence[Sequence[float]], of_rank: Sequence[float]) -> tuple[int, int] | None:
    """Return the first (rank, loader) for which the rank has samples of the micro-batch but none of this loader."""
    gaps = ((rank, loader) for loader, part in enumerate(of_parts) for rank in empty_ranks(part) if of_rank[rank])
    return next(gaps, None)
