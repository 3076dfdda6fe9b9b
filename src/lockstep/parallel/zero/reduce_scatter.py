"""Reduce-scatter: a transport that leaves every rank with the mean of its slice of each bucket, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.shared_memory import SharedReduction
from lockstep.parallel.transport import Size
from lockstep.parallel.zero.shard_layout import STEP, padded

SPARE = 2
"""Buffers of a size that are kept between rounds: fresh memory costs time, kept memory costs memory."""


class Scatter:
    """Sums each rank's slice of a bucket on that rank.

    NCCL does it by its reduce-scatter. Gloo's is an all-reduce of a copy, which sends twice as much as is needed:
    there each rank sends the others their slices and sums what it gets in the order of ranks, so that the sum
    does not depend on the layout.

    Args:
        group: the ranks.
        whole: whether a bucket that starts now is to be summed on all ranks: it is about to be laid out anew.

    Attributes:
        flats: the padded buffers, by bucket; `lockstep.parallel.bucket.Bucket.flat` is the front part of them.
    """

    divides = True
    inline_marks = False  # the mark of a parameter would be summed on one rank alone
    alignment = STEP

    def __init__(self, group: comm.Group, whole: Callable[[], bool]) -> None:
        self.flats: list[Tensor] = []
        self._group = group
        self._whole = whole
        self._rank, self._world = comm.rank(group), comm.world_size(group)
        self._under_way: list[_Exchange] = []
        self._spare: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def buffers(self, sizes: list[Size]) -> list[Tensor]:
        """Tensors of this process, of a length that slices can share."""
        self._spare.clear()
        self.flats = [
            torch.zeros(padded(length, dtype.itemsize, self._world), dtype=dtype, device=device)
            for length, dtype, device in sizes
        ]
        return [flat[:length] for flat, (length, _, _) in zip(self.flats, sizes, strict=True)]

    def start(self, bucket: Bucket, scale: float) -> None:
        """Scale, and send the others their slices."""
        flat = self.flats[bucket.index]
        flat.mul_(scale)
        if self._whole():
            bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)
        elif not flat.is_cuda:
            self._finish_what_has_come()
            bucket.work = self._exchange(flat)
        elif "cuda:nccl" in dist.get_backend_config(self._group):
            bucket.work = reduce_scatter(flat.view(self._world, -1)[self._rank], flat, self._group)
        else:  # gloo exchanges tensors of the CPU only
            bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """A message begins when its bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        """Return when this rank's slice holds the sum; the rest of the bucket holds nothing of use."""
        bucket.work.wait()

    def close(self) -> None:
        """Let go of the memory."""
        self._spare.clear()

    def _exchange(self, flat: Tensor) -> _Exchange:
        spare = self._spare.setdefault((flat.numel(), flat.dtype, flat.device), [])
        room = spare.pop() if spare else torch.empty_like(flat)
        exchange = _Exchange(flat.view(self._world, -1)[self._rank], room, spare, flat, self._world, self._group)
        self._under_way.append(exchange)
        return exchange

    def _finish_what_has_come(self) -> None:
        """Sum what is there, so that its memory serves the next bucket."""
        while self._under_way and self._under_way[0].is_there():
            self._under_way.pop(0).wait()


class _Exchange:
    """All slices of one rank on their way to it."""

    def __init__(
        self, result: Tensor, room: Tensor, spare: list[Tensor], flat: Tensor, world: int, group: comm.Group
    ) -> None:
        self._result, self._room, self._spare, self._world = result, room, spare, world
        self._work: Any = dist.all_to_all_single(
            room.view(torch.uint8), flat.view(torch.uint8), group=group, async_op=True
        )

    def is_there(self) -> bool:
        """Whether all slices have come."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Sum them in the order of ranks."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        parts = self._room.view(self._world, -1)
        self._result.copy_(parts[0])
        for part in parts[1:]:
            self._result.add_(part)
        if len(self._spare) < SPARE:
            self._spare.append(self._room)


class SharedScatter(SharedReduction):
    """The same in memory that the ranks of a host share, where it costs nothing to leave all ranks with all sums."""

    alignment = STEP

    def buffers(self, sizes: list[Size]) -> list[Tensor] | None:  # type: ignore[override]
        """Buffers of zeros in common memory, of a length that slices can share; None, on all ranks, without it."""
        longer = [(padded(length, dtype.itemsize, self._world), dtype, device) for length, dtype, device in sizes]
        flats = super().buffers(longer)
        self.flats: list[Tensor] = flats or []
        return flats and [flat[:length] for flat, (length, _, _) in zip(flats, sizes, strict=True)]


def reduce_scatter(output: Tensor, flat: Tensor, group: comm.Group) -> Any:
    """Begin to sum this rank's slice of ``flat`` into ``output``; gives the work to wait for."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    return call(output, flat, group=group, async_op=True)


def all_gather(flat: Tensor, part: Tensor, group: comm.Group) -> Any:
    """Begin to fill ``flat`` with all ranks' ``part``, which may be a part of it; gives the work to wait for."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    # as bytes: gloo does not know every dtype
    return call(flat.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)
