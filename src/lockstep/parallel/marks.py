"""The message in which ranks tell each other which parameters they used, where that cannot travel in the buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket


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
