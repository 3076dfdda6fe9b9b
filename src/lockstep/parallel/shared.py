"""Ranks on one host: their buckets lie in memory that all of them see, and are summed in place, in rank order.

Each rank has its own copy of every bucket in that memory. When all have filled theirs, each *summer* sums its
*share* of the bucket, a stretch of it, over all copies, and writes the sum into all of them. All ranks are
summers of a bucket, but of a small one a single rank, which takes fewer messages:

    start   tell the summers that this rank's copy is filled; sum the shares of buckets that all have filled
    wait    wait until all have filled theirs, sum this rank's share, tell the others; wait until all shares are

Nobody touches a rank's copy before its `start` and after its `wait`. Buckets are started in one order on all
ranks, so it is enough to count: there is a semaphore for each pair of ranks and each of the two messages
("filled", "summed"), to which one adds and from which the other takes. No thread is needed for any of it.

Bits: every gradient is multiplied by the scale, rounded, and the products are added up in the order of the
ranks. So the sum depends neither on the layout of the buckets nor on who was first, and at two ranks it is
bitwise that of gloo, and of torch's ``DistributedDataParallel``.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections import deque
from ctypes import c_void_p

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lockstep.ground import comm
from lockstep.ground.pages import common_pages, host, space
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.semaphores import Semaphores
from lockstep.parallel.transport import AllReduce, Size

LINE = 64
"""Bytes at whose multiples buckets and shares begin: a line of the cache, so that no two ranks write into one."""
SMALL = 2**15
"""Bytes of a bucket up to which a single rank sums it."""
CACHED = 2**20
"""Bytes of all copies together that are scaled, summed and copied before the next: they stay in the cache."""

_FILLED, _SUMMED = 0, 1


class SharedReduction(AllReduce):
    """Carries buckets of CPU tensors through memory that the ranks of a host have in common; see `open`.

    Sparse gradients go through the group.
    """

    def __init__(self, group: comm.Group, semaphores: Semaphores) -> None:
        super().__init__(group)
        rank, world = comm.rank(group), comm.world_size(group)
        self._rank, self._world = rank, world
        self._numbers = dist.get_process_group_ranks(group) if comm.is_distributed() else [0]
        # every rank begins with the one after it, so that not all of them come to one at the same time
        self._others = [(rank + step) % world for step in range(1, world)]
        self._semaphores = semaphores
        self._add, self._take = semaphores.add, semaphores.take
        tell = [{to: semaphores[(what * world + rank) * world + to] for to in self._others} for what in (0, 1)]
        self._tell_filled, self._tell_summed = tell[_FILLED], list(tell[_SUMMED].values())
        self._hear = [{of: semaphores[(what * world + of) * world + rank] for of in self._others} for what in (0, 1)]
        self._shares: list[_Share] = []
        self._to_sum: deque[_Share] = deque()  # started, and this rank has not summed its share
        self._to_finish: deque[_Share] = deque()  # started, and not known to be summed by all
        self._failed = ""

    @classmethod
    def open(cls, group: comm.Group) -> SharedReduction | None:
        """Carry the buckets of ``group`` so, or None, on all its ranks alike, where that cannot be.

        It can be on Linux, where all ranks are processes of one host that can have memory in common. A
        collective.
        """
        ranks = comm.all_gather_object((host(), space(), os.getpid()), group)
        if len({where for where, _, _ in ranks}) > 1 or len(set(ranks)) < len(ranks) or sys.platform != "linux":
            return None  # several hosts; ranks that are threads of one process
        semaphores = Semaphores.open(group, 2 * len(ranks) ** 2)
        return None if semaphores is None else cls(group, semaphores)

    def buffers(self, sizes: list[Size]) -> list[Tensor] | None:  # type: ignore[override]
        """Buffers of zeros in common memory; None, on all ranks, if it cannot be had or a device is no CPU.

        Earlier buffers are nobody's but this rank's from here on, and live as long as a tensor lies in them.
        """
        assert not self._to_finish, "a new layout in the middle of a round"
        self._shares = []
        starts, end = [], 0
        for length, dtype, _ in sizes:
            starts.append(end)
            end += _up(length * dtype.itemsize, LINE)
        stride = _up(max(end, 1), mmap.PAGESIZE)
        ours = all(device.type == "cpu" for _, _, device in sizes)
        if not all(comm.all_gather_object(ours, self._group)):
            return None
        pages = common_pages(self._group, stride * self._world, part=(self._rank * stride, stride))
        if pages is None:
            return None
        os.close(pages.handle)
        own = []
        for index, ((length, dtype, _), start) in enumerate(zip(sizes, starts, strict=True)):
            # a storage for each buffer: who copies a gradient with its storage copies no more than its bucket
            own.append(_lay(pages.memory, length, dtype, self._rank * stride + start))
            self._shares.append(self._share(pages.memory, index, length, dtype, start, stride))
        return own

    def _share(self, memory: mmap.mmap, index: int, length: int, dtype: torch.dtype, start: int, stride: int) -> _Share:
        """This rank's share of the bucket ``index``, which begins at the byte ``start`` of each copy."""
        size = dtype.itemsize
        if length * size <= SMALL:
            summer = index % self._world
            begin, end = (0, length) if summer == self._rank else (0, 0)
            summers = {summer}
        else:
            of_each = _up(-(-length // self._world), LINE // size)
            begin, end = min(self._rank * of_each, length), min((self._rank + 1) * of_each, length)
            summers = set(range(-(-length // of_each)))
        blocks = []
        if begin < end:
            whole = _lay(memory, stride * self._world // size, dtype, 0)
            step = max(2**14, CACHED // self._world // size) * torch.get_num_threads()
            for first in range(begin, end, step):
                width = min(step, end - first)
                blocks.append(whole.as_strided((self._world, width), (stride // size, 1), start // size + first))
        others = [rank for rank in self._others if rank in summers]
        return _Share(blocks, self._rank in summers, others, [self._tell_filled[rank] for rank in others])

    # -- a round

    def start(self, bucket: Bucket, scale: float) -> None:
        """Tell the others that ``bucket`` is filled here, and sum what all have filled; does not wait."""
        if bucket.is_sparse:
            super().start(bucket, scale)
            return
        if self._failed:
            raise RuntimeError(self._failed)
        share = self._shares[bucket.index]
        assert not share.under_way, f"bucket {bucket.index} is started twice in a round"
        share.under_way = True
        if scale != share.scale:
            share.scale_by(scale)
        self._to_finish.append(share)
        if share.is_mine:
            share.unheard = list(self._others)
            self._to_sum.append(share)
        else:
            share.unheard = list(share.others)
        for semaphore in share.tell:
            self._add(semaphore)
        self._sum_what_is_filled()

    def wait(self, bucket: Bucket) -> None:
        """Return when all ranks have summed their shares of ``bucket``.

        Raises:
            RuntimeError: another rank is gone, or did not come within the group's timeout.
        """
        if bucket.is_sparse:
            super().wait(bucket)
            return
        if self._failed:
            raise RuntimeError(self._failed)
        share = self._shares[bucket.index]
        while share.under_way:
            self._sum_what_is_filled()
            first = self._to_finish[0]
            what = _FILLED if self._to_sum and self._to_sum[0] is first else _SUMMED
            if not self._hear_all(first, what):
                self._sleep(first, what, bucket)
            elif what == _SUMMED:
                self._to_finish.popleft().under_way = False

    def close(self) -> None:
        """Let go of the memory. Ranks that still wait for this one are told by an error."""
        self._failed = self._failed or "this reducer is closed"
        self._shares = []
        self._semaphores.close()

    def _sum_what_is_filled(self) -> None:
        """Sum this rank's shares of buckets that all ranks have filled, as far as there are."""
        while self._to_sum and self._hear_all(self._to_sum[0], _FILLED):
            share = self._to_sum.popleft()
            share.sum()
            share.unheard = list(share.others)
            for semaphore in self._tell_summed:
                self._add(semaphore)

    def _hear_all(self, share: _Share, what: int) -> bool:
        """Take the messages that have come; whether they are all there now."""
        hear, unheard = self._hear[what], share.unheard
        while unheard and self._take(hear[unheard[0]]):
            unheard.pop(0)
        return not unheard

    def _sleep(self, share: _Share, what: int, bucket: Bucket) -> None:
        """Sleep until a rank that was not heard sends its message.

        Raises:
            RuntimeError: a rank is gone, or too late.
        """
        hear, unheard = self._hear[what], share.unheard
        begun = time.monotonic()
        while not self._semaphores.wait(hear[unheard[0]]):
            # Before all have filled a bucket of which this rank is a summer, nobody can have left with good reason.
            # Later, a rank may have sent its last message, to this one too, and gone.
            needed = self._others if what == _FILLED else list(unheard)
            gone = [other for other in needed if self._semaphores.is_gone(other)]
            silent = [other for other in gone if other not in unheard or not self._take(hear[other])]
            if silent:
                self._fail(
                    f"{self._named(silent)} left (the process has ended, or its reducer is closed or has failed) while "
                    f"{self._named([self._rank])} waited for the reduction of bucket {bucket.index}"
                )
            for other in gone:
                unheard.remove(other)
            if not unheard:
                return
            limit = timeout_of(self._group)
            if time.monotonic() - begun > limit:
                self._fail(
                    f"{self._named(unheard)} did not come to the reduction of bucket {bucket.index}, for which "
                    f"{self._named([self._rank])} has waited {limit:g} s, the timeout of the process group: all ranks "
                    "must run the same backwards (for slow ones there is init_process_group(timeout=...))"
                )
        unheard.pop(0)

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._semaphores.close()  # whoever waits for this rank is told in turn
        raise RuntimeError(reason)

    def _named(self, members: list[int]) -> str:
        """Members of the group by their ranks: ``"rank 3"``, ``"ranks 0, 2"``."""
        numbers = sorted(self._numbers[member] for member in members)
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _Share:
    """The stretch of a bucket that this rank sums, and how the round stands."""

    __slots__ = ("_blocks", "_factor", "is_mine", "others", "scale", "tell", "under_way", "unheard")

    def __init__(self, blocks: list[Tensor], is_mine: bool, others: list[int], tell: list[c_void_p]) -> None:
        self.is_mine = is_mine  #: whether this rank is one of the bucket's summers
        self.others = others  #: the other summers
        self.tell = tell  #: how they are told that this rank's copy is filled
        # of each block: all copies together, the first of them, each of the others, the others together
        self._blocks = [(block, block[0], list(block[1:]), block[1:]) for block in blocks]
        self.scale = 1.0
        self._factor: Tensor | float = 1.0
        self.under_way = False
        self.unheard: list[int] = []  #: ranks whose message is awaited

    def scale_by(self, scale: float) -> None:
        """Multiply every copy by ``scale`` from now on."""
        self.scale = self._factor = scale
        if self._blocks and self._blocks[0][0].dtype in (torch.float32, torch.float64):
            # A number becomes a tensor of this dtype at every multiplication, which takes 7 us. Narrower dtypes are
            # multiplied in float32, by the number itself.
            self._factor = torch.tensor(scale, dtype=self._blocks[0][0].dtype)

    def sum(self) -> None:
        """Leave the sum over the ranks, in their order, of each copy times the scale in every copy."""
        factor, scaled = self._factor, self.scale != 1.0
        for block, total, others, rest in self._blocks:
            if scaled:
                block.mul_(factor)
            for other in others:
                total.add_(other)
            rest.copy_(total)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _lay(memory: mmap.mmap, length: int, dtype: torch.dtype, start: int) -> Tensor:
    """The ``length`` elements that begin at the byte ``start``; they keep the memory alive."""
    if length == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=length, offset=start)


def timeout_of(group: comm.Group) -> float:
    """Seconds after which a collective of ``group`` on the CPU gives up."""
    try:
        backend = (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a group that carries no CPU tensors
        return default_pg_timeout.total_seconds()
