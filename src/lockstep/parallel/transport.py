"""How a bucket's mean over the ranks is made: what the reducer asks for, and the plain answer, an all-reduce."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import ALIGNMENT, Bucket

Size = tuple[int, torch.dtype, torch.device]


class Transport(Protocol):
    """What the reducer asks of whoever carries its buckets.

    Order of calls, by the reducer, alike on all ranks: `buffers` at each layout; in a round `start` for each
    bucket in order, from inside the backward, then `wait` for each; `close` at the end.

    Attributes:
        inline_marks: whether the marks of used parameters may stand at a buffer's end and are summed with it.
        alignment: bytes at whose multiples a gradient starts in a buffer.
        divides: whether gradients are divided before they are summed.
    """

    divides: bool
    inline_marks: bool
    alignment: int

    def buffers(self, sizes: list[Size]) -> list[Tensor] | None:
        """A flat buffer of zeros for each bucket; None, on all ranks, if they cannot be had."""
        ...

    def start(self, bucket: Bucket, scale: float) -> None:
        """``bucket.flat`` holds this rank's gradients, or (``scale`` 1) what is left of them after the division; begin
        to sum ``scale`` times them over the ranks."""
        ...

    def flush(self) -> None:
        """Return when no message of the buckets that were started will be begun any more, and others may be."""
        ...

    def wait(self, bucket: Bucket) -> None:
        """Return when ``bucket.flat`` holds that sum."""
        ...

    def close(self) -> None:
        """No bucket will come any more."""
        ...


class AllReduce:
    """One asynchronous all-reduce a bucket."""

    divides = True
    inline_marks = True
    alignment = ALIGNMENT

    def __init__(self, group: comm.Group) -> None:
        self._group = group

    def buffers(self, sizes: list[Size]) -> list[Tensor]:
        """Tensors of this process."""
        return [torch.zeros(length, dtype=dtype, device=device) for length, dtype, device in sizes]

    def start(self, bucket: Bucket, scale: float) -> None:
        """Scale, and hand over to the group."""
        if scale != 1:
            bucket.flat.mul_(scale)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """A message begins when its bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        """Wait for the group."""
        bucket.work.wait()

    def close(self) -> None:
        """Nothing to let go of."""
