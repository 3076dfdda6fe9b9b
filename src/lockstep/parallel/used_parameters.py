"""Which parameters the ranks used: the message that tells it, and buckets that nobody used left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.shared_memory import SharedReduction
from lockstep.parallel.transport import AllReduce, Size, Transport

# -- who used what -------------------------------------------------------------------------------------------


class Marks:
    """The marks of all buckets of a round, one byte for each parameter, on their way over ``group``.

    Args:
        buckets: of the round, all launched.
        willing: whether this rank could hold later backwards to this one.
        group: the ranks that are to agree.

    Attributes:
        nbytes: what this rank sends.
        work: the collective; None where there is nobody to tell.
    """

    def __init__(self, buckets: Sequence[Bucket], willing: bool, group: comm.Group) -> None:
        self._own = [bytes(bucket.used) for bucket in buckets]
        # A rank that used everything and is not willing knows what comes of it. A GPU would wait here for all of its
        # backward, in each round.
        self._looks = willing or any(0 in used for used in self._own)
        marks = bytearray([not willing]) + b"".join(bucket.used for bucket in buckets)
        self._marks = torch.frombuffer(marks, dtype=torch.uint8)
        self.nbytes = 0
        self.work: Any = None
        if comm.world_size(group) > 1:
            if comm.carrier(group, self._marks.device).type == "cuda":
                # from pinned memory, so that this process does not wait for the kernels of the backward
                self._marks = self._marks.pin_memory().to(buckets[0].device, non_blocking=True)
            self.nbytes = self._marks.nbytes
            self.work = dist.all_reduce(self._marks, dist.ReduceOp.MAX, group, async_op=True)

    def wait(self) -> tuple[list[Sequence[Any] | None], bool]:
        """For each bucket who got a gradient on any rank; and whether all ranks were willing."""
        if self.work is not None:
            self.work.wait()
        if not self._looks:
            return list(self._own), False
        unwilling, *found = self._marks.tolist()
        parts: list[Sequence[Any] | None] = []
        start = 0
        for own in self._own:
            parts.append(found[start : start + len(own)])
            start += len(own)
        return parts, not unwilling


# -- buckets that stay ---------------------------------------------------------------------------------------


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
