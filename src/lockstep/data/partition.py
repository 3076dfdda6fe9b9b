"""Division of an epoch's positions (places in the order of samples) into windows, micro-batches and ranks' parts.

All functions are pure.

In `data/` a *rank* is one of the ranks that see different samples: see `lockstep.data.source.Replicas`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Position: TypeAlias = "int | list[list[Any]] | None"
"""Progress of a source: the number of positions drawn, or for a stream the number of samples that each rank and worker
has drawn (as plain data). None if only the number of micro-batches is known."""


@dataclass(frozen=True)
class Partition:
    """Division of an epoch's ``n`` positions into accumulation windows, micro-batches, and the parts of the ranks.

    A window is a global batch of ``batch x size`` positions, or ``window`` positions if set. Ranks share it evenly
    (their parts differ by at most one position) or by weight. Each rank divides its part evenly over the window's
    micro-batches. Micro-batches are consecutive, and so are the ranks' parts within a micro-batch. Therefore one
    process that accumulates ``size`` micro-batches sees the same micro-batches as ``size`` ranks.

    Example:
        >>> partition = Partition(n=11, batch=2, size=2)
        >>> [partition.span(2, rank) for rank in range(2)]
        [(8, 10), (10, 11)]
        >>> partition = Partition(n=70, batch=8, size=3, window=32)
        >>> [partition.sizes(number) for number in range(partition.length)]
        [[6, 6, 5], [5, 5, 5], [6, 6, 5], [5, 5, 5], [2, 2, 2]]
        >>> Partition(n=100, batch=8, size=2, weights=(3, 1)).sizes(0)
        [12, 4]
    """

    n: int
    """Number of positions."""
    batch: int
    """Positions of a rank in a micro-batch (a loader's ``batch_size``); with weights, the mean over the ranks."""
    size: int
    """Number of ranks."""
    drop_last: bool = False
    """Drop the last window if it is not full."""
    window: int = 0
    """Positions of a full window; 0 means ``batch x size``."""
    weights: tuple[float, ...] = ()
    """A positive number for each rank, to which its part of a window is proportional. Empty: equal parts."""
    number: int = 0
    """Number of the first micro-batch."""
    position: int = 0
    """Index of the first of the ``n`` positions."""

    @property
    def full(self) -> int:
        """Index of the first micro-batch with fewer than ``batch x size`` positions, or with none for some rank.

        Equal to ``number`` if a full window does not have ``batch x size`` positions.
        """
        whole = self.batch * self.size
        if self.window not in (0, whole) or (self.weights and 0 in apportion(whole, self.size, self.weights)):
            return self.number
        return self.number + self.n // whole

    @property
    def rest(self) -> int:
        """Number of positions in a partial last window; 0 if there is none, or if ``drop_last`` drops it."""
        return 0 if self.drop_last else self.n % self._window

    @property
    def length(self) -> int:
        """Index after the last micro-batch, counted from the start of the epoch."""
        return self.number + self.n // self._window * self._micro(self._window) + self._micro(self.rest)

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """Return (first position, position after the last) of a rank's part of a micro-batch; equal if it is empty."""
        start, count, micro, part = self._locate(number)
        if not self.weights:  # a faster form of the code below
            return even_span(count, micro * self.size, part * self.size + rank, start)
        before, _, ends = _parts_by_weight(count, self.weights, micro, part)
        return start + before + (ends[rank - 1] if rank else 0), start + before + ends[rank]

    def sizes(self, number: int) -> list[int]:
        """Return a list with each rank's number of positions in a micro-batch."""
        _, count, micro, part = self._locate(number)
        if self.weights:
            return list(_parts_by_weight(count, self.weights, micro, part)[1])
        each, more = divmod(count, micro * self.size)
        larger = min(max(0, more - part * self.size), self.size)
        return [each + 1] * larger + [each] * (self.size - larger)

    def repartition(self, number: int, weights: tuple[float, ...]) -> Partition:
        """Return a partition of the positions from micro-batch ``number`` on, with different weights.

        Example:
            >>> partition = Partition(n=20, batch=4, size=2).repartition(1, (3, 1))
            >>> [partition.span(1, rank) for rank in range(2)]
            [(8, 14), (14, 16)]

        Raises:
            ValueError: the micro-batch is not the first of a window.
        """
        start, part = self.position + self.n, 0
        if number < self.length:
            start, _, _, part = self._locate(number)
        if part:
            raise ValueError(
                f"Partition.repartition(number={number}): this micro-batch is inside an accumulation window; pass "
                "the first micro-batch of a window"
            )
        left = self.position + self.n - start
        return replace(self, n=left, weights=weights, number=number, position=start)

    @property
    def _window(self) -> int:
        return self.window or self.batch * self.size

    def _micro(self, count: int) -> int:
        """Return the number of micro-batches in a window of ``count`` positions."""
        return -(-count // (self.batch * self.size))

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """Locate a micro-batch: return the start and sizes of its window, and the micro-batch's index in the window.

        The result is the window's first position, its number of positions, its number of micro-batches, and the
        micro-batch's index.
        """
        window, part = divmod(number - self.number, self._micro(self._window))
        start = window * self._window
        count = min(self._window, self.n - start)
        return self.position + start, count, self._micro(count), part


def even_span(count: int, size: int, rank: int, start: int = 0) -> tuple[int, int]:
    """Return (first position, position after the last) of a rank's part, if ranks divide ``count`` positions evenly.

    Parts differ by at most one position.
    """
    each, more = divmod(count, size)
    first = start + rank * each + min(rank, more)
    return first, first + each + (rank < more)


def apportion(count: int, size: int, weights: tuple[float, ...] = ()) -> Sequence[int]:
    """Return each rank's number of positions, if ``count`` positions are divided evenly or by ``weights``.

    The remainder after rounding down goes to the ranks with the largest fractions; ties go to the lower rank.
    """
    if weights:
        return _by_weight(count, weights)
    each, more = divmod(count, size)
    return [each + 1] * more + [each] * (size - more)


@functools.lru_cache(maxsize=64)  # an epoch has full windows and a last one
def _by_weight(count: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    # Exact: rounding must not depend on the machine.
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    exact = [numerator * (unit // denominator) for numerator, denominator in ratios]
    total = sum(exact)
    shares = [divmod(count * weight, total) for weight in exact]
    parts = [share for share, _ in shares]
    by_remainder = sorted(range(len(parts)), key=lambda rank: -shares[rank][1])
    for rank in by_remainder[: count - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


@functools.lru_cache(maxsize=64)
def _parts_by_weight(
    count: int, weights: tuple[float, ...], micro: int, part: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return (offset of a micro-batch in its window, count of positions per rank, running sums of these numbers)."""
    totals = _by_weight(count, weights)
    sizes = tuple(total // micro + (part < total % micro) for total in totals)
    before = sum(even_span(total, micro, part)[0] for total in totals)
    return before, sizes, tuple(itertools.accumulate(sizes))


@dataclass(frozen=True)
class WindowPlan:
    """Plan of the windows in an epoch that was planned or started on a different number of ranks."""

    ranks: int
    """Number of ranks in the plan; its batch is this number times a loader's ``batch_size``."""
    accumulate: int
    """Number of the plan's batches in a window."""
    limit: int | float = math.inf
    """Maximum number of the plan's batches in an epoch."""
    number: int = 0
    """The first micro-batch of this attempt of the run; an earlier attempt drew those before it."""
    position: Position = None
    """Data that earlier attempts drew, from `LoaderSource.position`; None: computed from the numbers."""

    def micro(self, size: int) -> int:
        """Return the number of micro-batches into which ``size`` ranks divide a window."""
        return -(-self.accumulate * self.ranks // size)

    def divides(self, size: int) -> bool:
        """Return True if ``size`` ranks can divide a window into full micro-batches."""
        return self.accumulate * self.ranks % size == 0

    def window(self, batch: int) -> int:
        """Return the number of positions in a window for a loader with ``batch`` as its ``batch_size``."""
        return self.ranks * self.accumulate * batch

    def limited(self, n: int | float, batch: int, drop_last: bool) -> int | float:
        """Return how many of an epoch's ``n`` positions are drawn in all attempts, by ``limit`` and ``drop_last``."""
        whole = self.ranks * batch
        n = min(n, self.limit * whole)
        if drop_last and not math.isinf(n):
            # Counted from the resume: what was drawn before it stays in the epoch.
            n -= (n - self.drawn) % whole
        return n

    @property
    def drawn(self) -> int:
        """Number of positions that earlier attempts have drawn; 0 for a source that does not count positions."""
        return self.position if isinstance(self.position, int) else 0

    def reached(self, number: int, batch: int, size: int) -> int:
        """Return how many positions of the epoch precede micro-batch ``number``, which must start a window."""
        windows, more = divmod(number - self.number, self.micro(size))
        return self.drawn + windows * self.window(batch) + (more * batch * size if self.divides(size) else 0)

    def partition(self, n: int, batch: int, size: int, drop_last: bool, weights: tuple[float, ...] = ()) -> Partition:
        """Return a `Partition` of the rest of an epoch of ``n`` positions among ``size`` ranks.

        Positions that earlier attempts have drawn are not in the rest.
        """
        left = max(0, int(self.limited(n, batch, drop_last)) - self.drawn)
        window = 0 if self.divides(size) else self.window(batch)
        return Partition(left, batch, size, False, window, weights, self.number, self.drawn)
