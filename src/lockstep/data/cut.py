"""The cut of an epoch's positions into windows, of those into micro-batches, and of those into parts of ranks; pure.

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
"""Where a source stands: how many positions were drawn; of a stream, what each rank and worker has drawn of it, as
plain data; None where only the number of micro-batches is known."""


@dataclass(frozen=True)
class Cut:
    """``n`` positions in windows, each shared out over its micro-batches and the ranks.

    A window is a global batch of ``batch x size`` positions, or what ``window`` says. Ranks share it evenly (their
    parts differ by at most one position) or by weight, and each divides its part evenly over the window's
    micro-batches. Micro-batches follow each other, and in a micro-batch the parts of ranks do, so that one process
    that accumulates ``size`` micro-batches and ``size`` ranks see the same micro-batches.

    Example:
        >>> cut = Cut(n=11, batch=2, size=2)
        >>> [cut.span(2, rank) for rank in range(2)]
        [(8, 10), (10, 11)]
        >>> cut = Cut(n=70, batch=8, size=3, window=32)
        >>> [cut.sizes(number) for number in range(cut.length)]
        [[6, 6, 5], [5, 5, 5], [6, 6, 5], [5, 5, 5], [2, 2, 2]]
        >>> Cut(n=100, batch=8, size=2, weights=(3, 1)).sizes(0)
        [12, 4]
    """

    n: int
    """Positions that are cut."""
    batch: int
    """Positions that a rank takes at once (a loader's ``batch_size``); by weight, the mean over the ranks."""
    size: int
    """Number of ranks."""
    drop_last: bool = False
    """Leave out the last window if it is not full."""
    window: int = 0
    """Positions of a full window; 0: ``batch x size``."""
    weights: tuple[float, ...] = ()
    """A positive number for each rank, to which its part of a window is proportional; empty: all are equal."""
    number: int = 0
    """Micro-batches are counted from here on."""
    position: int = 0
    """The first of the ``n`` positions."""

    @property
    def full(self) -> int:
        """End of the leading micro-batches in each of which a rank takes as many positions as in the first one.

        Each rank takes some. None can be relied upon in windows of another size than ``batch x size``.
        """
        whole = self.batch * self.size
        if self.window not in (0, whole) or (self.weights and 0 in apportion(whole, self.size, self.weights)):
            return self.number
        return self.number + self.n // whole

    @property
    def rest(self) -> int:
        """Positions of the last, partial window; 0 if there is none."""
        return 0 if self.drop_last else self.n % self._window

    @property
    def length(self) -> int:
        """The number after the last micro-batch's."""
        return self.number + self.n // self._window * self._micro(self._window) + self._micro(self.rest)

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """First position and end of a rank's part of a micro-batch; the same where its part is empty."""
        start, count, micro, part = self._locate(number)
        if not self.weights:  # the same as below, at once
            return even_span(count, micro * self.size, part * self.size + rank, start)
        before, _, ends = _parts_by_weight(count, self.weights, micro, part)
        return start + before + (ends[rank - 1] if rank else 0), start + before + ends[rank]

    def sizes(self, number: int) -> list[int]:
        """Number of positions that each rank takes of a micro-batch."""
        _, count, micro, part = self._locate(number)
        if self.weights:
            return list(_parts_by_weight(count, self.weights, micro, part)[1])
        each, more = divmod(count, micro * self.size)
        larger = min(max(0, more - part * self.size), self.size)
        return [each + 1] * larger + [each] * (self.size - larger)

    def recut(self, number: int, weights: tuple[float, ...]) -> Cut:
        """The positions from micro-batch ``number`` on, with which a window begins, shared out by other weights.

        Example:
            >>> cut = Cut(n=20, batch=4, size=2).recut(1, (3, 1))
            >>> [cut.span(1, rank) for rank in range(2)]
            [(8, 14), (14, 16)]

        Raises:
            ValueError: the micro-batch is inside a window.
        """
        start, part = self.position + self.n, 0
        if number < self.length:
            start, _, _, part = self._locate(number)
        if part:
            raise ValueError(f"Cut.recut(number={number}): a window is under way there")
        left = self.position + self.n - start
        return replace(self, n=left, weights=weights, number=number, position=start)

    @property
    def _window(self) -> int:
        return self.window or self.batch * self.size

    def _micro(self, count: int) -> int:
        """Micro-batches of a window of so many positions."""
        return -(-count // (self.batch * self.size))

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """(first position, positions, micro-batches) of a micro-batch's window, and its number in the window."""
        window, part = divmod(number - self.number, self._micro(self._window))
        start = window * self._window
        count = min(self._window, self.n - start)
        return self.position + start, count, self._micro(count), part


def even_span(count: int, size: int, rank: int, start: int = 0) -> tuple[int, int]:
    """A rank's part of ``count`` positions from ``start`` on, shared out as evenly as possible."""
    each, more = divmod(count, size)
    first = start + rank * each + min(rank, more)
    return first, first + each + (rank < more)


def apportion(count: int, size: int, weights: tuple[float, ...] = ()) -> Sequence[int]:
    """How many of ``count`` positions each rank takes: as even, or as near to its weight, as whole numbers can be.

    What is left after rounding down goes to the ranks with the largest remainders, of equal ones to the first.
    """
    if weights:
        return _by_weight(count, weights)
    each, more = divmod(count, size)
    return [each + 1] * more + [each] * (size - more)


@functools.lru_cache(maxsize=64)  # an epoch has full windows and a last one
def _by_weight(count: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    ratios = [weight.as_integer_ratio() for weight in weights]  # exact: rounding must not depend on the machine
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
    """Of a micro-batch of a window: positions of the window before it, each rank's number of positions, and its end."""
    totals = _by_weight(count, weights)
    sizes = tuple(total // micro + (part < total % micro) for total in totals)
    before = sum(even_span(total, micro, part)[0] for total in totals)
    return before, sizes, tuple(itertools.accumulate(sizes))


@dataclass(frozen=True)
class WindowPlan:
    """How an epoch is cut that another number of ranks has planned, or begun."""

    ranks: int
    """A plan's batch is this many times a loader's ``batch_size``."""
    accumulate: int
    """Batches of the plan in a window."""
    limit: int | float = math.inf
    """Batches of the plan in an epoch, at most."""
    number: int = 0
    """The first micro-batch of this attempt of the run; those before it were drawn by an earlier one."""
    position: Position = None
    """What those have drawn, as the source that drew it tells; None: tell by numbers."""

    def micro(self, size: int) -> int:
        """Micro-batches of a window on ``size`` ranks."""
        return -(-self.accumulate * self.ranks // size)

    def divides(self, size: int) -> bool:
        """Whether full micro-batches on ``size`` ranks make a window."""
        return self.accumulate * self.ranks % size == 0

    def window(self, batch: int) -> int:
        """Positions of a window, for a loader's ``batch_size``."""
        return self.ranks * self.accumulate * batch

    def kept(self, n: int | float, batch: int, drop_last: bool) -> int | float:
        """How many of an epoch's ``n`` positions are drawn, those before ``number`` included."""
        whole = self.ranks * batch
        n = min(n, self.limit * whole)
        if drop_last and not math.isinf(n):
            n -= (n - self.drawn) % whole
        return n

    @property
    def drawn(self) -> int:
        """Positions that were drawn before ``number``, of a source that counts them."""
        return self.position if isinstance(self.position, int) else 0

    def reached(self, number: int, batch: int, size: int) -> int:
        """Positions that have been drawn before a micro-batch with which a window begins."""
        windows, more = divmod(number - self.number, self.micro(size))
        return self.drawn + windows * self.window(batch) + (more * batch * size if self.divides(size) else 0)

    def cut(self, n: int, batch: int, size: int, drop_last: bool, weights: tuple[float, ...] = ()) -> Cut:
        """The cut of an epoch of ``n`` positions over ``size`` ranks."""
        left = max(0, int(self.kept(n, batch, drop_last)) - self.drawn)
        window = 0 if self.divides(size) else self.window(batch)
        return Cut(left, batch, size, False, window, weights, self.number, self.drawn)
