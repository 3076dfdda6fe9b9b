"""The cut of an epoch whose windows stay what they are while the number of ranks changes; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.data.cut import Cut, even_span


@dataclass(frozen=True)
class Recut:
    """``n`` positions in windows of ``window``, each shared out over micro-batches and ranks as evenly as possible.

    Rank ``r`` of micro-batch ``j`` takes part ``j x size + r`` of a window, so that the parts of a window follow each
    other as those of a `Cut` do. No part is above ``batch``; they differ by at most one position.

    Example:
        >>> cut = Recut(n=70, batch=8, size=3, window=32)
        >>> [cut.weights(number) for number in range(cut.length)]
        [[6, 6, 5], [5, 5, 5], [6, 6, 5], [5, 5, 5], [2, 2, 2]]
    """

    n: int
    """Positions in the epoch."""
    batch: int
    """Most positions that a rank takes at once (a loader's ``batch_size``)."""
    size: int
    """Number of ranks."""
    window: int
    """Positions of a full window."""

    full = 0
    """Leading micro-batches of ``batch`` positions on every rank: none that could be relied upon."""

    @property
    def micro(self) -> int:
        """Micro-batches of a full window."""
        return self._micro(self.window)

    @property
    def length(self) -> int:
        """Number of micro-batches."""
        windows, rest = divmod(self.n, self.window)
        return windows * self.micro + self._micro(rest)

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """First position and end of a rank's part of a micro-batch; the same where its part is empty."""
        start, count, parts, first = self._place(number)
        return even_span(count, parts, first + rank, start)

    def weights(self, number: int) -> list[int]:
        """Number of positions each rank takes of a micro-batch."""
        _, count, parts, first = self._place(number)
        each, more = divmod(count, parts)
        return [each + (part < more) for part in range(first, first + self.size)]

    def _micro(self, count: int) -> int:
        return -(-count // (self.batch * self.size))

    def _place(self, number: int) -> tuple[int, int, int, int]:
        """(first position, positions, parts) of a micro-batch's window, and the part of rank 0."""
        window, number = divmod(number, self.micro)
        start = window * self.window
        count = min(self.window, self.n - start)
        return start, count, self._micro(count) * self.size, number * self.size


@dataclass(frozen=True)
class Rest:
    """What is left of an epoch from ``position`` on, in micro-batches that are counted from ``number`` on."""

    cut: Cut | Recut
    """Of what is left, as if it were an epoch."""
    number: int
    position: int

    @property
    def batch(self) -> int:
        """Most positions that a rank takes at once."""
        return self.cut.batch

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cut.size

    @property
    def full(self) -> int:
        """End of the leading micro-batches of ``batch`` positions on every rank."""
        return self.number + self.cut.full

    @property
    def length(self) -> int:
        """The number after the last micro-batch's."""
        return self.number + self.cut.length

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """First position and end of a rank's part of a micro-batch."""
        start, stop = self.cut.span(number - self.number, rank)
        return self.position + start, self.position + stop

    def weights(self, number: int) -> list[int]:
        """Number of positions each rank takes of a micro-batch."""
        return self.cut.weights(number - self.number)


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
    """The first micro-batch of this life of the run; those before it were drawn by an earlier one."""
    place: object = None
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
        """How many of an epoch's ``n`` positions are drawn, those before ``place`` included."""
        whole, begun = self.ranks * batch, self.position
        n = min(n, self.limit * whole)
        if drop_last and not math.isinf(n):
            n -= (n - begun) % whole
        return n

    @property
    def position(self) -> int:
        """Positions that were drawn before ``number``, of a source that counts them."""
        return self.place if isinstance(self.place, int) else 0

    def reached(self, number: int, batch: int, size: int) -> int:
        """Positions that have been drawn before a micro-batch with which a window begins."""
        windows, more = divmod(number - self.number, self.micro(size))
        return self.position + windows * self.window(batch) + (more * batch * size if self.divides(size) else 0)

    def cut(self, n: int, batch: int, size: int, drop_last: bool) -> Cut | Recut | Rest:
        """The cut of an epoch of ``n`` positions over ``size`` ranks."""
        left = max(0, int(self.kept(n, batch, drop_last)) - self.position)
        cut = Cut(left, batch, size) if self.divides(size) else Recut(left, batch, size, self.window(batch))
        return Rest(cut, self.number, self.position) if self.number or self.position else cut
