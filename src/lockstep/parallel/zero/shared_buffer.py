"""A stage: memory that the ranks of a host have in common, over which they exchange slices of their buffers.

A rank lays its slice of a buffer onto the stage and tells the others, who fetch it when they need it; none of them
has to wait for one that is busy elsewhere. What lies on the stage is replaced only when all have fetched it, which
each has done before it sends its own next slice of that buffer.

Sends come in one order on all ranks, so that counting is enough: there is a semaphore for each pair of ranks and each
of two messages, "laid" and "fetched".
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections import deque
from datetime import timedelta

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.pages import common_pages, host, space
from lockstep.parallel.shared_memory import Semaphores

_LAID, _FETCHED = 0, 1


class Stage:
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
        self._coming: deque[Coming] = deque()

    @classmethod
    def open(cls, group: comm.Group, seconds: float) -> Stage | None:
        """A stage for ``group``, or None, on all its ranks alike, where they cannot have memory in common.

        A collective.

        Args:
            group: the ranks.
            seconds: how long to wait for a rank at most.
        """
        ranks = comm.all_gather_object((host(), space(), os.getpid()), group)
        if len({where for where, _, _ in ranks}) > 1 or len(set(ranks)) < len(ranks) or sys.platform != "linux":
            return None
        semaphores = Semaphores.open(group, 2 * len(ranks) ** 2)
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

    def send(self, index: int, buffer: Tensor) -> Coming:
        """Lay this rank's slice of ``buffer`` onto the stage; the others' slices are fetched by ``wait``.

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
        coming = Coming(self, self._count, place, buffer.view(self._world, -1))
        self._coming.append(coming)
        return coming

    def fetch(self, wanted: Coming, patience: timedelta | None) -> None:
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


class Coming:
    """Slices of a buffer on their way."""

    def __init__(self, stage: Stage, number: int, place: Tensor, buffer: Tensor) -> None:
        self.number, self.place, self.buffer = number, place, buffer
        self.is_here = False
        self._stage = stage

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all of them are in the buffer."""
        self._stage.fetch(self, timeout)
