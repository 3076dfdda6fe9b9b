"""Division of a global batch between ranks of unequal speed: window times, best shares, and times of changes.

All functions are pure: the same numbers give the same shares on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LARGE = 0.2
"""A change that shortens a window by this fraction is made at once."""
SMALL = 0.05
"""A change that shortens a window by less is never made: times vary as much from one measurement to the next."""
MOST_VOTES = 16
"""Maximum number of measurements in a row that must favor a small change before it is made."""
APART = 0.2
"""Fraction by which a rank's samples must differ before its fixed seconds are estimated from two times."""


@dataclass(frozen=True)
class Cost:
    """Model of a rank's time for an accumulation window: ``fixed`` seconds, plus seconds proportional to its samples.

    Example:
        >>> Cost(samples=16, seconds=3.0, fixed=1.0).at(8)
        2.0
    """

    samples: int
    """Measured number of samples, at least 1."""
    seconds: float
    """Measured seconds for these samples."""
    fixed: float = 0.0
    """Seconds that do not depend on the number of samples."""
    most: int = 2**62
    """Largest number of samples that the rank's memory allows."""

    def at(self, samples: int) -> float:
        """Return the predicted seconds of a window with ``samples`` samples."""
        return self.fixed + (self.seconds - self.fixed) * samples / self.samples

    def within(self, seconds: float) -> int:
        """Return how many samples, at least 1, the rank can process in the given seconds and within its memory."""
        each = (self.seconds - self.fixed) / self.samples
        if each <= 0:
            return self.most
        return max(1, min(self.most, math.floor((seconds - self.fixed) / each)))


def bottleneck(costs: Sequence[Cost], parts: Sequence[int]) -> float:
    """Return the slowest rank's seconds for a window, if ``parts`` has the number of samples of each rank."""
    return max(cost.at(part) for cost, part in zip(costs, parts, strict=True))


def best_parts(costs: Sequence[Cost], total: int) -> tuple[int, ...]:
    """Divide ``total`` samples between ranks so that the slowest rank finishes as early as possible.

    The solution is exact. Each rank takes at least one sample, and not more than its memory allows.

    Args:
        costs: cost of each rank. The ranks' memory together allows at least ``total`` samples.
        total: number of samples, which is at least the number of ranks.

    Example:
        >>> best_parts([Cost(16, 1.0), Cost(16, 3.0)], 32)
        (24, 8)
    """
    low, high = 0.0, max(cost.at(min(total, cost.most)) for cost in costs)
    # 16 halvings get close to the best time; the loops below deal out the last samples one by one
    for _ in range(16):
        middle = (low + high) / 2
        if sum(cost.within(middle) for cost in costs) >= total:
            high = middle
        else:
            low = middle
    parts = [min(cost.within(low), total) for cost in costs]
    spare = total - sum(parts)
    while spare > 0:  # each to the rank that would finish it first
        room = [rank for rank, part in enumerate(parts) if part < costs[rank].most]
        first = min(room or range(len(parts)), key=lambda rank: (costs[rank].at(parts[rank] + 1), rank))
        parts[first] += 1
        spare -= 1
    while spare < 0:  # slow ranks that take at least one sample were given more than the time allows
        last = max((rank for rank, part in enumerate(parts) if part > 1), key=lambda rank: costs[rank].at(parts[rank]))
        parts[last] -= 1
        spare += 1
    return tuple(parts)


@dataclass(frozen=True)
class Move:
    """Change of the ranks' shares of a global batch: the shares before and after it, and the predicted speedup."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds of a window on each rank before the change."""
    gain: float
    """Predicted speedup of a window: 2.0 is twice as fast."""


@dataclass
class Votes:
    """Counter of measurements that favor a change. A large change is made at once, a small one after several in a row.

    Whenever a small change takes most samples from a different rank than the last small change did, the required number
    of measurements doubles, up to `MOST_VOTES`.

    Example:
        >>> votes = Votes()
        >>> votes.are_enough(0.1, giver=0), votes.are_enough(0.1, giver=0)
        (False, True)
    """

    _count: int = 0
    _wanted: int = 2
    _giver: int = -1  # in the newest measurement
    _last_giver: int = -1  # in the last small change that was made

    def are_enough(self, saved: float, giver: int) -> bool:
        """Count a measurement that favors a change. Return True if the change should be made now.

        Args:
            saved: fraction by which the change shortens a window.
            giver: the rank that the change would take most from.
        """
        if saved >= LARGE:
            self._wanted, self._last_giver = 2, -1
            return True
        if saved < SMALL:
            self._count = 0
            return False
        self._count = self._count + 1 if giver == self._giver else 1
        self._giver = giver
        if self._count < self._wanted:
            return False
        # changes that alternate between ranks follow noise
        if self._last_giver not in (-1, giver):
            self._wanted = min(2 * self._wanted, MOST_VOTES)
        self._last_giver = giver
        return True

    def reset(self) -> None:
        """Reset the count, after a change or after a measurement that favors no change."""
        self._count = 0


@dataclass
class ShareControl:
    """Controller that decides, from successive measurements, when the ranks' shares of a batch change.

    A measurement is the median of the seconds that windows took each rank. Two at different shares show which part of
    a rank's seconds is fixed. A change that saves at least `LARGE` of a window is made at once, and one that saves at
    least `SMALL` when several measurements in a row favor it (`Votes`). Shares follow a rank that has become slow, and
    stay if no rank is slow.

    Example:
        >>> control = ShareControl(2)
        >>> control.look([1.0, 3.0], (16, 16)).after
        (24, 8)
    """

    size: int
    """Number of ranks."""
    _free: list[float] = field(init=False)  # fixed seconds by rank, as the number of samples that take as long
    _before: tuple[tuple[int, ...], tuple[float, ...]] | None = None  # measurement that led to the last change
    _votes: Votes = field(default_factory=Votes)

    def __post_init__(self) -> None:
        self._free = [0.0] * self.size

    def look(self, seconds: Sequence[float], parts: Sequence[int], most: Sequence[int] | None = None) -> Move | None:
        """Evaluate one measurement. Return the change of shares that should be made now, or None.

        Args:
            seconds: seconds of a window on each rank.
            parts: samples of each rank in that window.
            most: samples that each rank's memory allows; its present number is always allowed.
        """
        if min(seconds) <= 0:  # the clock is too coarse for such windows
            return None
        parts, total = tuple(parts), sum(parts)
        self._estimate_fixed(seconds, parts)
        now = max(seconds)
        # no cut makes the slowest rank faster than the fastest one is now
        if min(seconds) > (1 - SMALL) * now:
            self._votes.reset()
            return None
        costs = [
            Cost(part, time, time * free / (free + part), max(part, room))
            for time, part, free, room in zip(seconds, parts, self._free, most or [2**62] * self.size, strict=True)
        ]
        # a lower bound, as if samples could be divided, takes a tenth of the time of the exact cut
        rates = [cost.samples / (cost.seconds - cost.fixed) for cost in costs]
        bound = (total + sum(cost.fixed * rate for cost, rate in zip(costs, rates, strict=True))) / sum(rates)
        if bound > (1 - SMALL) * now:
            self._votes.reset()
            return None
        after = best_parts(costs, total)
        then = bottleneck(costs, after)
        giver = max(range(self.size), key=lambda rank: (parts[rank] - after[rank], -rank))
        if not self._votes.are_enough(1 - then / now if parts != after else 0.0, giver):
            return None
        self._votes.reset()
        self._before = parts, tuple(seconds)
        return Move(parts, after, tuple(seconds), now / then)

    def _estimate_fixed(self, seconds: Sequence[float], parts: tuple[int, ...]) -> None:
        """Estimate each rank's fixed seconds from this measurement and the measurement before the last change."""
        if self._before is None or self._before[0] == parts:
            return
        before, self._before = self._before, None
        fair = sum(parts) / self.size
        for rank, (part, earlier, time, then) in enumerate(zip(parts, before[0], seconds, before[1], strict=True)):
            if abs(part - earlier) < APART * earlier:
                continue
            each = (time - then) / (part - earlier)
            if each <= 0:  # its speed has changed in between
                continue
            # a bound and a mean keep one noisy pair of measurements from moving all samples
            found = min(max(time / each - part, 0.0), fair)
            self._free[rank] = found if not self._free[rank] else (found + self._free[rank]) / 2
