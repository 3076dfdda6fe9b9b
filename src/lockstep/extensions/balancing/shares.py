"""Shares of a global batch for ranks of unequal speed: what a window costs on each, the best cut, when to change it.

Pure: the same numbers give the same shares on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LARGE = 0.2
"""A change that shortens a window by this part is made at once."""
SMALL = 0.05
"""One that shortens it by less than this part is never made: so much differs from one look to the next."""
MOST_VOTES = 16
"""Looks in a row, at most, that have to ask for a small change before it is made."""
APART = 0.2
"""Samples of a rank have to differ by this part before two times tell what of them is fixed."""


@dataclass(frozen=True)
class Cost:
    """What a window costs a rank: ``fixed`` seconds, and as many a sample as it takes to have cost ``seconds``.

    Example:
        >>> Cost(samples=16, seconds=3.0, fixed=1.0).at(8)
        2.0
    """

    samples: int
    """How many the rank had, at least 1."""
    seconds: float
    """How long they took."""
    fixed: float = 0.0
    """Seconds that do not depend on the number of samples."""
    most: int = 2**62
    """Samples that the rank's memory allows."""

    def at(self, samples: int) -> float:
        """Seconds for so many samples."""
        return self.fixed + (self.seconds - self.fixed) * samples / self.samples

    def within(self, seconds: float) -> int:
        """How many samples the rank can do in so many seconds, within its memory; at least 1."""
        each = (self.seconds - self.fixed) / self.samples
        if each <= 0:
            return self.most
        return max(1, min(self.most, math.floor((seconds - self.fixed) / each)))


def bottleneck(costs: Sequence[Cost], parts: Sequence[int]) -> float:
    """Seconds of the slowest rank, for which all others wait."""
    return max(cost.at(part) for cost, part in zip(costs, parts, strict=True))


def best_parts(costs: Sequence[Cost], total: int) -> tuple[int, ...]:
    """How many of ``total`` samples each rank is to take so that the slowest is through as early as can be.

    Exact; each takes at least one, and none more than its memory allows.

    Args:
        costs: of the ranks; their memory has room for ``total`` together.
        total: at least the number of ranks.

    Example:
        >>> best_parts([Cost(16, 1.0), Cost(16, 3.0)], 32)
        (24, 8)
    """
    low, high = 0.0, max(cost.at(min(total, cost.most)) for cost in costs)
    for _ in range(16):  # what is left between is dealt out one by one
        middle = (low + high) / 2
        if sum(cost.within(middle) for cost in costs) >= total:
            high = middle
        else:
            low = middle
    parts = [min(cost.within(low), total) for cost in costs]
    spare = total - sum(parts)
    while spare > 0:  # each to whoever is through first with it
        room = [rank for rank, part in enumerate(parts) if part < costs[rank].most]
        first = min(room or range(len(parts)), key=lambda rank: (costs[rank].at(parts[rank] + 1), rank))
        parts[first] += 1
        spare -= 1
    while spare < 0:  # ranks whose floor of one sample is above it
        last = max((rank for rank, part in enumerate(parts) if part > 1), key=lambda rank: costs[rank].at(parts[rank]))
        parts[last] -= 1
        spare += 1
    return tuple(parts)


def _bound(costs: Sequence[Cost], total: int) -> float:
    """Seconds that no cut is below: those of one into parts of samples, too. Takes a tenth of the time."""
    rates = [cost.samples / (cost.seconds - cost.fixed) for cost in costs]
    return (total + sum(cost.fixed * rate for cost, rate in zip(costs, rates, strict=True))) / sum(rates)


@dataclass(frozen=True)
class Move:
    """A change of shares."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of each rank's window before."""
    gain: float
    """By how much the model says that windows become faster: 2.0 is twice as fast."""


@dataclass
class Votes:
    """Whether a change is due: at once where it gains much, after several looks in a row where it gains little.

    Where small changes go to and fro between ranks, ever more looks are asked for.

    Example:
        >>> votes = Votes()
        >>> votes.are_enough(0.1, giver=0), votes.are_enough(0.1, giver=0)
        (False, True)
    """

    _count: int = 0
    _wanted: int = 2
    _giver: int = -1  # who gave most in the newest look
    _last_giver: int = -1  # the same of the last small change that was made

    def are_enough(self, saved: float, giver: int) -> bool:
        """Count a look.

        Args:
            saved: the part by which the change shortens a window.
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
        if self._last_giver not in (-1, giver):  # to and fro
            self._wanted = min(2 * self._wanted, MOST_VOTES)
        self._last_giver = giver
        return True

    def reset(self) -> None:
        """A change was made, or a look asked for none."""
        self._count = 0


@dataclass
class ShareControl:
    """Decides, look by look, by how much each rank's share is to change.

    A look is the seconds that a window took each rank, the median of some windows. From two looks at different shares
    it learns which part of a rank's seconds is fixed. A change that gains much is made at once. One that gains little
    is made when several looks in a row ask for it, and never below `SMALL`; where such changes go to and fro, ever
    more looks are asked for. So shares follow a rank that has become slow, and stay where nobody is slow.

    Example:
        >>> control = ShareControl(2)
        >>> control.look([1.0, 3.0], (16, 16)).after
        (24, 8)
    """

    size: int
    """Number of ranks."""
    _free: list[float] = field(init=False)  # of each rank, the samples that would take as long as what is fixed
    _before: tuple[tuple[int, ...], tuple[float, ...]] | None = None  # the look that led to the last change
    _votes: Votes = field(default_factory=Votes)

    def __post_init__(self) -> None:
        self._free = [0.0] * self.size

    def look(self, seconds: Sequence[float], parts: Sequence[int], most: Sequence[int] | None = None) -> Move | None:
        """The change to make after a look; None: none.

        Args:
            seconds: of a window on each rank.
            parts: of a window's samples, what each rank had then.
            most: the samples that each rank's memory allows; what it had is allowed in any case.
        """
        if min(seconds) <= 0:  # a clock too coarse for such windows tells nothing of speeds
            return None
        parts, total = tuple(parts), sum(parts)
        self._learn(seconds, parts)
        now = max(seconds)
        if min(seconds) > (1 - SMALL) * now:  # no cut brings the slowest below the fastest of now
            self._votes.reset()
            return None
        costs = [
            Cost(part, time, time * free / (free + part), max(part, room))
            for time, part, free, room in zip(seconds, parts, self._free, most or [2**62] * self.size, strict=True)
        ]
        if _bound(costs, total) > (1 - SMALL) * now:
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

    def _learn(self, seconds: Sequence[float], parts: tuple[int, ...]) -> None:
        """What of each rank's seconds is fixed, from this look and the one before the change."""
        if self._before is None or self._before[0] == parts:
            return
        before, self._before = self._before, None
        fair = sum(parts) / self.size
        for rank, (part, earlier, time, then) in enumerate(zip(parts, before[0], seconds, before[1], strict=True)):
            if abs(part - earlier) < APART * earlier:
                continue
            each = (time - then) / (part - earlier)
            if each <= 0:  # its speed has changed meanwhile
                continue
            found = min(max(time / each - part, 0.0), fair)
            self._free[rank] = found if not self._free[rank] else (found + self._free[rank]) / 2
