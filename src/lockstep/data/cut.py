"""The cut of an epoch's positions into global batches, and of those into the parts of ranks; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """``n`` positions in global batches of ``batch x size`` positions.

    Rank ``r`` takes ``batch`` neighbouring positions of a full global batch, so that one process that
    accumulates ``size`` micro-batches and ``size`` ranks see the same micro-batches. What is left at the end
    is shared out as evenly as possible (parts differ by at most one position) unless ``drop_last``.

    Example:
        >>> cut = Cut(n=11, batch=2, size=2)
        >>> [cut.span(2, rank) for rank in range(2)]
        [(8, 10), (10, 11)]
    """

    n: int
    """Positions in the epoch."""
    batch: int
    """Positions a rank takes of a full global batch (a loader's ``batch_size``)."""
    size: int
    """Number of ranks."""
    drop_last: bool = False
    """Leave out the last global batch if it is not full."""

    @property
    def full(self) -> int:
        """Number of full global batches."""
        return self.n // (self.batch * self.size)

    @property
    def rest(self) -> int:
        """Positions of the last, partial global batch; 0 if there is none."""
        return 0 if self.drop_last else self.n % (self.batch * self.size)

    @property
    def length(self) -> int:
        """Number of global batches, the partial one included."""
        return self.full + (self.rest > 0)

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """First position and end of a rank's part of a global batch; the same where its part is empty."""
        start = number * self.batch * self.size
        if number < self.full:
            start += rank * self.batch
            return start, start + self.batch
        start, stop = even_span(self.rest, self.size, rank, start)
        return start, stop

    def weights(self, number: int) -> list[int]:
        """Number of positions each rank takes of a global batch."""
        if number < self.full:
            return [self.batch] * self.size
        each, more = divmod(self.rest, self.size)
        return [each + (rank < more) for rank in range(self.size)]


def even_span(count: int, size: int, rank: int, start: int = 0) -> tuple[int, int]:
    """A rank's part of ``count`` positions from ``start`` on, shared out as evenly as possible."""
    each, more = divmod(count, size)
    first = start + rank * each + min(rank, more)
    return first, first + each + (rank < more)
