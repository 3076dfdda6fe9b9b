"""What pairs of times tell: the median of their ratios, and between which bounds it lies.

Two ways of doing the same are timed one right after the other, again and again, in turns as to which is first.
A machine that is slow for a while is slow for both, so their ratio moves far less than either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

CONFIDENCE = 0.90


class Interval(NamedTuple):
    """A median and the bounds between which the true one lies with a confidence of 90 %."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """The median and in brackets the bounds, each by ``spec``."""
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of ``values`` and its interval by order statistics, which holds for any distribution.

    The k-th smallest and the k-th largest value enclose the median unless fewer than k values fell on one side of
    it, whose chance is a binomial sum; k is the largest with which both together are at most 1 - ``confidence``.

    Args:
        values: independent measurements; with fewer than 5 the bounds are the smallest and the largest.
        confidence: of the interval, below 1.

    Raises:
        ValueError: if there are no values.

    Example:
        >>> interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0])
        Interval(median=4.0, low=1.0, high=7.0)
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("interval: no values")
    below, rank = 0.0, 0  # chance that at most `rank` - 1 values are below the median
    while rank < (count + 1) // 2:
        below += math.comb(count, rank) / 2**count
        if 2 * below > 1 - confidence:
            break
        rank += 1
    rank = max(rank, 1)
    return Interval(median(ordered), ordered[rank - 1], ordered[count - rank])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Interval of the median of ``ours`` over ``theirs``, pair by pair."""
    return interval([mine / other for mine, other in zip(ours, theirs, strict=True)])


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: every name stands first, second, ... equally often, before and after each other.

    Example:
        >>> list(turns(["a", "b"], 2))
        [['a', 'b'], ['b', 'a']]
    """
    count = len(names)
    for number in range(rounds):
        shift = (number // 2) % count
        order = [*names[shift:], *names[:shift]]
        yield order[::-1] if number % 2 else order
