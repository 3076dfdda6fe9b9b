"""Transport for the reduction of gradient buckets over ranks that skips buckets whose parameters no rank uses."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.transport import AllReduce, Size, Transport
from lockstep.ground import comm

USED_LATER = (
    "skip_all_reduce_unused_params=True: parameter {name!r} has a gradient, but its bucket is not reduced, since no "
    "rank used it in the first backward. Remove the argument if the unused parameters differ between steps"
)


class SkipUnused:
    """Transport that skips buckets whose parameters no rank used in the first round with the current bucket layout.

    It reads the flags of used parameters that are sent with the buckets. Without flags (sparse gradients,
    ``static_graph=True``) no bucket is skipped.

    Attributes:
        inner: the given transport, or an all-reduce if that has no memory for a layout.
        skipped: indices of the skipped buckets; the same on all ranks.
    """

    def __init__(self, inner: Transport, group: comm.Group) -> None:
        self.inner = inner
        self.divides, self.inline_used, self.alignment = inner.divides, inner.inline_used, inner.alignment
        self.skipped: set[int] = set()
        self._group = group
        self._unused: set[int] = set()
        self._count = 0
        self._is_settled = False

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor] | None:
        """Return the inner transport's buffers for a new layout of buckets. At first no bucket is skipped."""
        self.skipped.clear()
        self._unused.clear()
        self._count, self._is_settled = len(sizes), False
        made = self.inner.buffers(sizes)
        # shared memory is too small on all ranks or on none, so all change to the all-reduce together
        if made is None:
            self.inner.close()
            self.inner = AllReduce(self._group)
            made = self.inner.buffers(sizes)
        return made

    def start(self, bucket: Bucket, scale: float) -> None:
        """Start to sum the bucket over the ranks, unless the bucket is skipped.

        Raises:
            RuntimeError: the bucket is skipped, but this rank has a gradient in it.
        """
        if bucket.index not in self.skipped:
            self.inner.start(bucket, scale)
            return
        if 1 in bucket.used:
            raise RuntimeError(USED_LATER.format(name=bucket.names[bucket.used.index(1)]))

    def flush(self) -> None:
        self.inner.flush()

    def wait(self, bucket: Bucket) -> None:
        """Wait for the bucket, and record whether any rank used a parameter in it."""
        if bucket.index in self.skipped:
            return
        self.inner.wait(bucket)
        if self._is_settled:
            return
        if bucket.holds_used and not any(bucket.used_anywhere()):
            self._unused.add(bucket.index)
        if bucket.index + 1 == self._count:
            # a round in which no rank used anything (a skipped backward) decides nothing
            self._is_settled = len(self._unused) < self._count
            self.skipped.update(self._unused if self._is_settled else ())
            self._unused.clear()

    def close(self) -> None:
        self.inner.close()
