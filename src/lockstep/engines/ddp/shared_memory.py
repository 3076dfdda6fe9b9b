"""Ranks on one host: their buckets lie in memory that all of them see, and are summed in place, in rank order."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import c_void_p

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.transport import AllReduce, Size
from lockstep.ground import comm
from lockstep.ground.rank import waits
from lockstep.ground.shared_pages import Pages, common_pages, on_one_host, space

# -- semaphores ----------------------------------------------------------------------------------------------


BYTES = 64
"""For one semaphore: a line of the cache, so that no two of them are in one."""
TICK = 0.05
"""Seconds between two looks at whether the ranks that are waited for still live."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """Counters in memory that all ranks of a group have in common: one adds to them, another waits and takes.

    Adding and taking order memory, on every processor: who has taken sees all that was written before it was
    added. A wait sleeps in the kernel and lets Python's signal handlers run.

    Each rank holds a lock on its own byte of the memory's file. The kernel gives it up when the rank's process
    ends, however it ends and in whichever container, and nobody inherits it.

    Args:
        pages: the memory, zeros; this object closes its handle.
        rank: of this process.
        count: of semaphores; their value is 0.

    Raises:
        OSError, AttributeError, ImportError: on a system that lacks what this needs.
    """

    def __init__(self, pages: Pages, rank: int, count: int) -> None:
        self._handle = pages.handle
        self._letting_go = weakref.finalize(self, os.close, pages.handle)
        import fcntl  # not on Windows

        self._lockf, self._unlock = fcntl.lockf, fcntl.LOCK_UN
        self._own, self._probe = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB
        self._anchor = ctypes.c_char.from_buffer(pages.memory)  # keeps the memory where it is
        self._begin = ctypes.addressof(self._anchor)
        self.add = _function("sem_post", ctypes.c_void_p)
        self._try = _function("sem_trywait", ctypes.c_void_p)
        self._until = _Time()
        self._clock, self._sleep = _sleeping()
        self._lockf(self._handle, self._own, 1, rank)
        if rank == 0:
            begin = _function("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
            for index in range(count):
                if begin(self[index], 1, 0):
                    raise OSError("this system has no semaphores that processes share")

    @classmethod
    def open(cls, group: comm.Group, count: int) -> Semaphores | None:
        """``count`` semaphores for the ranks of ``group``, on one host; or None on all of them. A collective."""
        pages = common_pages(group, count * BYTES)
        if pages is None:
            return None
        opened: Semaphores | None = None
        with contextlib.suppress(OSError, AttributeError, ImportError):
            opened = cls(pages, comm.rank(group), count)
        if all(comm.all_gather_object(opened is not None, group)):
            return opened
        if opened is not None:
            opened.close()
        return None

    @classmethod
    def open_on_one_host(cls, group: comm.Group) -> Semaphores | None:
        """One for each of two messages between each pair of ranks, where they are processes of one Linux host.

        A collective; None, on all ranks alike, where they cannot have memory in common.
        """
        if not on_one_host(group) or sys.platform != "linux":
            return None
        ranks = comm.all_gather_object((space(), os.getpid()), group)
        if len(set(ranks)) < len(ranks):
            return None  # ranks that are threads of one process
        return cls.open(group, 2 * len(ranks) ** 2)

    def __getitem__(self, index: int) -> ctypes.c_void_p:
        """The semaphore with this number: what `add`, `take` and `wait` are given."""
        return ctypes.c_void_p(self._begin + index * BYTES)

    def take(self, semaphore: ctypes.c_void_p) -> bool:
        """Take one off, if it is not at 0."""
        return self._try(semaphore) == 0

    @waits()
    def wait(self, semaphore: ctypes.c_void_p, seconds: float = TICK) -> bool:
        """Take one off, and sleep for it, but not much longer than so many seconds; False if there was none."""
        end = time.clock_gettime_ns(self._clock) + int(seconds * 1e9)
        self._until.seconds, self._until.nanoseconds = divmod(end, 10**9)
        return self._sleep(semaphore, self._until)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended, or let go of these semaphores."""
        assert self._letting_go.alive
        try:
            self._lockf(self._handle, self._probe, 1, rank)  # shared: several may look at the same time
        except OSError:
            return False
        self._lockf(self._handle, self._unlock, 1, rank)
        return True

    def close(self) -> None:
        """Let go; the others see that this rank is gone. It also happens when nobody has this object any more."""
        self._letting_go()


def _function(name: str, *arguments: type) -> Callable[..., int]:
    """A function of the C library that does not wait, so that the interpreter need not be let go for it."""
    function = getattr(ctypes.PyDLL(None), name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _sleeping() -> tuple[int, Callable[[ctypes.c_void_p, _Time], bool]]:
    """The clock that a wait goes by, and the wait; it lets the interpreter go."""
    library = ctypes.CDLL(None)
    if hasattr(library, "sem_clockwait"):  # glibc 2.30: a clock that nobody sets
        clock, function = time.CLOCK_MONOTONIC, library.sem_clockwait
        function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
        return clock, lambda semaphore, until: function(semaphore, clock, until) == 0
    function = library.sem_timedwait
    function.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Time))
    return time.CLOCK_REALTIME, lambda semaphore, until: function(semaphore, until) == 0


# -- the transport -------------------------------------------------------------------------------------------


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
        semaphores = Semaphores.open_on_one_host(group)
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

    @waits()
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
