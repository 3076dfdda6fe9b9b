"""How slices of buckets travel: gradients summed to the rank that updates them, new parameters back to all.

A bucket's buffer is padded so that all ranks' slices are of one length, and cut without regard to parameters: a
parameter may lie in several slices. What a rank has of it is its *fragment*.

On one host, new parameters go over a `SharedBuffer`, memory that all ranks see: a rank lays its slice there and tells
the others, who fetch it when they need it; none of them has to wait for one that is busy elsewhere. What lies there is
replaced only when all have fetched it, which each has done before it sends its own next slice of that buffer. Sends
come in one order on all ranks, so that counting is enough: there is a semaphore for each pair of ranks and each of two
messages, "laid" and "fetched".
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.pages import common_pages
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.shared_memory import Semaphores, SharedReduction
from lockstep.parallel.transport import Size

# -- where slices lie: pure functions from sizes to places ---------------------------------------------------


STEP = 128
"""Bytes at whose multiples slices, and parameters in a bucket, begin.

Vectorised kernels take 128 bytes at a time and the rest of a tensor element by element, in code that may round
otherwise. Cut at their multiples, an element comes to the same code as in the whole parameter, and gets its bits.
"""


class Fragment(NamedTuple):
    """What a slice has of a parameter, in elements in the order of memory."""

    start: int
    """Its first element, counted within the parameter."""
    stop: int
    """Behind its last one; ``start`` where the slice has nothing of the parameter."""
    offset: int
    """Where it begins, counted within the bucket."""


def padded(length: int, itemsize: int, world: int) -> int:
    """The smallest length of at least ``length`` elements that ``world`` slices can share.

    Example:
        >>> padded(100, 4, 2), padded(64, 4, 2), padded(0, 4, 2)
        (128, 64, 0)
    """
    unit = max(1, STEP // itemsize) * world
    return -(-length // unit) * unit


def fragments(starts: Sequence[int], numels: Sequence[int], begin: int, end: int) -> list[Fragment]:
    """What the slice from ``begin`` to ``end`` of a bucket has of each of its parameters.

    Args:
        starts: where each parameter begins in the bucket.
        numels: elements of each.
        begin, end: of the slice.

    Example:
        >>> fragments([0, 64], [60, 100], begin=32, end=128)
        [Fragment(start=32, stop=60, offset=32), Fragment(start=0, stop=64, offset=64)]
    """
    found = []
    for first, numel in zip(starts, numels, strict=True):
        start = min(max(begin - first, 0), numel)
        stop = max(min(end - first, numel), start)
        found.append(Fragment(start, stop, first + start))
    return found


# -- gradients: reduce-scatter -------------------------------------------------------------------------------


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
        spare: buffers for the others' slices that are kept between rounds.
    """

    divides = True
    inline_used = False  # a used flag would be summed on one rank alone
    alignment = STEP

    def __init__(self, group: comm.Group, whole: Callable[[], bool]) -> None:
        self.flats: list[Tensor] = []
        self._group = group
        self._whole = whole
        self._rank, self._world = comm.rank(group), comm.world_size(group)
        self._under_way: list[_Exchange] = []
        self.spare: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def buffers(self, sizes: list[Size]) -> list[Tensor]:
        """Tensors of this process, of a length that slices can share."""
        self.spare.clear()
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
        elif flat.is_cpu:
            self._finish_what_has_come()
            bucket.work = self._exchange(flat)
        elif f"{flat.device.type}:gloo" not in dist.get_backend_config(self._group):
            bucket.work = reduce_scatter(flat.view(self._world, -1)[self._rank], flat, self._group)
        else:  # gloo exchanges tensors of the CPU only
            bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """A message begins when its bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        """Return when this rank's slice holds the sum; the rest of the bucket holds nothing of use."""
        bucket.work.wait()

    def close(self) -> None:
        self.spare.clear()

    def _exchange(self, flat: Tensor) -> _Exchange:
        spare = self.spare.setdefault((flat.numel(), flat.dtype, flat.device), [])
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


# -- parameters: a buffer that the ranks of a host share -----------------------------------------------------


_LAID, _FETCHED = 0, 1


class SharedBuffer:
    """Exchanges slices of CPU buffers between the processes of a host; see `open`."""

    def __init__(self, group: comm.Group, semaphores: Semaphores, seconds: float) -> None:
        rank, world = comm.rank(group), comm.world_size(group)
        self._group, self._rank, self._world = group, rank, world
        self._others = [(rank + step) % world for step in range(1, world)]
        self._semaphores = semaphores
        self._seconds = seconds
        self._tell = [{o: semaphores[(what * world + rank) * world + o] for o in self._others} for what in (0, 1)]
        self._hear = [{o: semaphores[(what * world + o) * world + rank] for o in self._others} for what in (0, 1)]
        self._heard = [dict.fromkeys(self._others, 0) for _ in (0, 1)]  # messages so far
        self._count = 0  # sends so far
        self._places: list[Tensor] = []
        self._last: list[int] = []  # of each buffer, the number of its last send
        self._coming: deque[PendingSlices] = deque()

    @classmethod
    def open(cls, group: comm.Group, seconds: float) -> SharedBuffer | None:
        """A shared_buffer for ``group``, or None, on all its ranks alike, where they cannot have memory in common.

        A collective.
        """
        semaphores = Semaphores.open_on_one_host(group)
        return None if semaphores is None else cls(group, semaphores, seconds)

    def lay_out(self, sizes: list[int]) -> bool:
        """Make room for buffers of these bytes, the same on all ranks; False, on all, where it cannot be had.

        A collective; nothing is on its way.
        """
        assert not self._coming, "a new layout while slices are on their way"
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // 64) * 64
        page = mmap.PAGESIZE
        part = max(-(-end // (self._world * page)), 1) * page  # what each rank reserves
        pages = common_pages(self._group, part * self._world, part=(self._rank * part, part))
        if pages is None:
            return False
        os.close(pages.handle)
        self._places = [
            torch.frombuffer(pages.memory, dtype=torch.uint8, count=size, offset=start) if size else torch.empty(0)
            for size, start in zip(sizes, starts, strict=True)
        ]
        self._last = [0] * len(sizes)
        return True

    def send(self, index: int, buffer: Tensor) -> PendingSlices:
        """Lay this rank's slice of ``buffer`` onto the shared_buffer; the others' slices are fetched by ``wait``.

        Args:
            index: of the buffer; sends come in one order on all ranks.
            buffer: bytes, which equal slices of all ranks fill.
        """
        place = self._places[index].view(self._world, -1)
        for other in self._others:
            self._await(_FETCHED, other, self._last[index], None)
        place[self._rank].copy_(buffer.view(self._world, -1)[self._rank])
        self._count += 1
        self._last[index] = self._count
        for other in self._others:
            self._semaphores.add(self._tell[_LAID][other])
        coming = PendingSlices(self, self._count, place, buffer.view(self._world, -1))
        self._coming.append(coming)
        return coming

    def fetch(self, wanted: PendingSlices, patience: timedelta | None) -> None:
        """Fetch what was sent, up to ``wanted``, in the order in which it was sent."""
        while not wanted.is_here:
            first = self._coming[0]
            for other in self._others:
                self._await(_LAID, other, first.number, patience)
                first.buffer[other].copy_(first.place[other])
                self._semaphores.add(self._tell[_FETCHED][other])
            first.is_here = True
            self._coming.popleft()

    def close(self) -> None:
        """Let go of the memory; ranks that wait for this one are told by an error."""
        self._places = []
        self._coming.clear()
        self._semaphores.close()

    def _await(self, what: int, other: int, number: int, patience: timedelta | None) -> None:
        """Return when ``other`` has sent its message of that number.

        Raises:
            RuntimeError: it is gone, or too late.
        """
        heard, semaphore, semaphores = self._heard[what], self._hear[what][other], self._semaphores
        limit = self._seconds if patience is None else patience.total_seconds()
        begun = None
        while heard[other] < number:
            if semaphores.take(semaphore) or semaphores.wait(semaphore):
                heard[other] += 1
                continue
            begun = begun or time.monotonic()
            if semaphores.is_gone(other):
                if semaphores.take(semaphore):  # its last words
                    heard[other] += 1
                    continue
                raise RuntimeError(
                    f"rank {other} left (the process has ended, or its reducer is detached) while rank {self._rank} "
                    "waited for its part of the new parameters"
                )
            if time.monotonic() - begun > limit:
                raise RuntimeError(
                    f"rank {other} did not come to the exchange of new parameters, for which rank {self._rank} has "
                    f"waited {limit:g} s: all ranks must call the optimizer's step equally often"
                )


class PendingSlices:
    """Slices of a buffer on their way."""

    def __init__(self, shared_buffer: SharedBuffer, number: int, place: Tensor, buffer: Tensor) -> None:
        self.number, self.place, self.buffer = number, place, buffer
        self.is_here = False
        self._shared_buffer = shared_buffer

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all of them are in the buffer."""
        self._shared_buffer.fetch(self, timeout)
