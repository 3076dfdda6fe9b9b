"""A transport that leaves out the buckets that no rank uses (``skip_all_reduce_unused_params`` of the container)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.shared import SharedReduction
from lockstep.parallel.transport import AllReduce, Size, Transport

WOKEN = (
    "skip_all_reduce_unused_params=True: parameter {name!r} got a gradient, and in the first backward no rank used it "
    "or its bucket, which is no longer reduced since. Wrap the model without it where unused parameters change"
)


class Sparing:
    """Carries buckets as another transport does, but for those that no rank used in the first round of their layout.

    What the ranks used they know from the marks that travel with the buckets; where marks do not travel so (sparse
    gradients, ``static_graph=True``), all buckets are carried.

    Args:
        inner: carries the buckets.
        group: the ranks.

    Attributes:
        inner: as given; all-reduces where it has no memory for a layout.
        asleep: indices of the buckets that are left out; the same on all ranks.
        spared_collectives, spared_bytes: what the reducer has counted and was not sent.
    """

    def __init__(self, inner: Transport, group: comm.Group) -> None:
        self.inner = inner
        self.divides, self.inline_marks, self.alignment = inner.divides, inner.inline_marks, inner.alignment
        self.asleep: set[int] = set()
        self.spared_collectives = 0
        self.spared_bytes = 0
        self._group = group
        self._unused: set[int] = set()
        self._count = 0
        self._is_settled = False

    @classmethod
    def open(cls, group: comm.Group, parameters: Iterable[Tensor], shared_memory: bool) -> Sparing:
        """One over shared memory where it can be had and is wanted, else over all-reduces. A collective."""
        wanted = shared_memory and all(parameter.device.type == "cpu" for parameter in parameters)
        return cls((SharedReduction.open(group) if wanted else None) or AllReduce(group), group)

    def buffers(self, sizes: list[Size]) -> list[Tensor] | None:
        """The inner one's; who uses the buckets of this layout is not known yet."""
        self.asleep.clear()
        self._unused.clear()
        self._count, self._is_settled = len(sizes), False
        made = self.inner.buffers(sizes)
        if made is None:
            self.inner.close()
            self.inner = AllReduce(self._group)
            made = self.inner.buffers(sizes)
        return made

    def start(self, bucket: Bucket, scale: float) -> None:
        """Begin to sum the bucket, unless it is left out.

        Raises:
            RuntimeError: it is, and this rank has a gradient in it.
        """
        if bucket.index not in self.asleep:
            self.inner.start(bucket, scale)
            return
        if 1 in bucket.used:
            raise RuntimeError(WOKEN.format(name=bucket.names[bucket.used.index(1)]))
        self.spared_collectives += 1
        self.spared_bytes += bucket.nbytes

    def flush(self) -> None:
        """The inner one's."""
        self.inner.flush()

    def wait(self, bucket: Bucket) -> None:
        """Wait for the bucket, and note whether anybody has used it."""
        if bucket.index in self.asleep:
            return
        self.inner.wait(bucket)
        if self._is_settled:
            return
        if bucket._marked and not any(bucket.used_anywhere()):
            self._unused.add(bucket.index)
        if bucket.index + 1 == self._count:
            self._is_settled = len(self._unused) < self._count  # not after a round in which nobody used anything
            self.asleep.update(self._unused if self._is_settled else ())
            self._unused.clear()

    def close(self) -> None:
        """The inner one's."""
        self.inner.close()
