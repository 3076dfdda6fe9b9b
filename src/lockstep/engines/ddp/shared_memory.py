"""Gradient reduction in shared memory: all ranks on one host sum buckets in place, in rank order."""

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
"""Size of a semaphore in bytes: one cache line, so that no two semaphores share a line."""
TICK = 0.05
"""Seconds between two checks that the awaited ranks are alive."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """Semaphores in shared memory of a group's ranks: one rank increments, another waits and decrements.

    Both operations order memory on every processor: a rank that decrements sees all that was written before the
    increment. A wait sleeps in the kernel and lets Python's signal handlers run.

    Each rank locks its own byte of the memory's file. The kernel releases the lock when the rank's process ends, in
    any way and in any container. The lock is not inherited.

    Args:
        pages: zeroed shared memory; `close` also closes its handle.
        rank: rank of this process.
        count: number of semaphores, with the initial value 0.

    Raises:
        OSError, AttributeError, ImportError: the system does not support shared semaphores.
    """

    def __init__(self, pages: Pages, rank: int, count: int) -> None:
        self._handle = pages.handle
        self._close = weakref.finalize(self, os.close, pages.handle)
        import fcntl  # not on Windows

        self._lockf, self._unlock = fcntl.lockf, fcntl.LOCK_UN
        self._own, self._probe = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB
        self._anchor = ctypes.c_char.from_buffer(pages.memory)  # keeps the memory mapped
        self._begin = ctypes.addressof(self._anchor)
        self.add = _function("sem_post", ctypes.c_void_p)
        self._try = _function("sem_trywait", ctypes.c_void_p)
        self._until = _Time()
        self._clock, self._sleep = _sleeping()
        self._lockf(self._handle, self._own, 1, rank)
        if rank == 0:
            initialize = _function("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
            for index in range(count):
                if initialize(self[index], 1, 0):
                    raise OSError("this system does not support semaphores that are shared between processes")

    @classmethod
    def open(cls, group: comm.Group, count: int) -> Semaphores | None:
        """Create ``count`` semaphores for a group on one host. Return None on all ranks if unsupported. Collective."""
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
        """Create two semaphores for each ordered pair of ranks, if all ranks run on one Linux host. Collective.

        Return None, on all ranks, if they cannot share memory.
        """
        if not on_one_host(group) or sys.platform != "linux":
            return None
        ranks = comm.all_gather_object((space(), os.getpid()), group)
        if len(set(ranks)) < len(ranks):
            return None  # ranks that are threads of one process
        return cls.open(group, 2 * len(ranks) ** 2)

    def __getitem__(self, index: int) -> ctypes.c_void_p:
        """Return a pointer to a semaphore, for `add`, `take` and `wait`."""
        return ctypes.c_void_p(self._begin + index * BYTES)

    def take(self, semaphore: ctypes.c_void_p) -> bool:
        """Decrement the semaphore without waiting. Return False if its value is 0."""
        return self._try(semaphore) == 0

    @waits()
    def wait(self, semaphore: ctypes.c_void_p, seconds: float = TICK) -> bool:
        """Wait at most about ``seconds`` for a positive value, and decrement it. Return False on a timeout."""
        end = time.clock_gettime_ns(self._clock) + int(seconds * 1e9)
        self._until.seconds, self._until.nanoseconds = divmod(end, 10**9)
        return self._sleep(semaphore, self._until)

    def is_gone(self, rank: int) -> bool:
        """Return True if the process of ``rank`` has ended or has closed its semaphores."""
        assert self._close.alive
        try:
            self._lockf(self._handle, self._probe, 1, rank)  # a shared lock: several ranks may check at the same time
        except OSError:
            return False
        self._lockf(self._handle, self._unlock, 1, rank)
        return True

    def close(self) -> None:
        """Release the semaphores. Other ranks then treat this rank as gone. Deleting the object also releases them."""
        self._close()


def _function(name: str, *arguments: type) -> Callable[..., int]:
    """Return the C library function ``name``. Its calls must not block, because they keep the interpreter lock."""
    function = getattr(ctypes.PyDLL(None), name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _sleeping() -> tuple[int, Callable[[ctypes.c_void_p, _Time], bool]]:
    """Return (clock id for deadlines, C function that waits for a semaphore without the interpreter lock)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "sem_clockwait"):  # glibc 2.30: a clock that cannot be set
        clock, function = time.CLOCK_MONOTONIC, library.sem_clockwait
        function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
        return clock, lambda semaphore, until: function(semaphore, clock, until) == 0
    function = library.sem_timedwait
    function.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Time))
    return time.CLOCK_REALTIME, lambda semaphore, until: function(semaphore, until) == 0


# -- the transport -------------------------------------------------------------------------------------------


LINE = 64
"""Alignment of buckets and shares in bytes: a cache line, so that no two ranks write to the same line."""
SMALL = 2**15
"""Size in bytes up to which one rank sums a whole bucket."""
CACHED = 2**20
"""Bytes of all ranks' copies that are scaled, summed and copied at once, so that they stay in the cache."""

_FILLED, _SUMMED = 0, 1


class SharedReduction(AllReduce):
    """Transport that sums buckets of CPU tensors in memory shared by all ranks on one host; see `open`.

    Sparse gradients are reduced by the group.
    """

    def __init__(self, group: comm.Group, semaphores: Semaphores) -> None:
        super().__init__(group)
        rank, world = comm.rank(group), comm.world_size(group)
        self._rank, self._world = rank, world
        self._numbers = dist.get_process_group_ranks(group) if comm.is_distributed() else [0]
        # every rank starts with the next one, so that they do not all access the same rank at once
        self._others = [(rank + step) % world for step in range(1, world)]
        self._semaphores = semaphores
        self._add, self._take = semaphores.add, semaphores.take
        # two semaphores for each pair of ranks and direction: a rank waits for messages of each other one separately
        signals = [{to: semaphores[(what * world + rank) * world + to] for to in self._others} for what in (0, 1)]
        self._signal_filled, self._signal_summed = signals[_FILLED], list(signals[_SUMMED].values())
        self._messages = [
            {of: semaphores[(what * world + of) * world + rank] for of in self._others} for what in (0, 1)
        ]
        self._shares: list[_Share] = []
        self._to_sum: deque[_Share] = deque()  # started; this rank has not summed its share
        self._to_finish: deque[_Share] = deque()  # started; not yet known to be summed by all ranks
        self._failed = ""

    @classmethod
    def open(cls, group: comm.Group) -> SharedReduction | None:
        """Create the transport for ``group``. Return None on all ranks if they cannot share memory. Collective.

        All ranks must run on one Linux host.
        """
        semaphores = Semaphores.open_on_one_host(group)
        return None if semaphores is None else cls(group, semaphores)

    def buffers(self, sizes: list[Size]) -> list[Tensor] | None:  # type: ignore[override]
        """Return zeroed buffers in shared memory; None on all ranks if memory is short or a device is not the CPU.

        Buffers from earlier calls become private to this rank, and are released with their tensors.
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
            # a storage for each buffer: copying a gradient with its storage copies at most its bucket
            own.append(_lay(pages.memory, length, dtype, self._rank * stride + start))
            self._shares.append(self._share(pages.memory, index, length, dtype, start, stride))
        return own

    def _share(self, memory: mmap.mmap, index: int, length: int, dtype: torch.dtype, start: int, stride: int) -> _Share:
        """Return this rank's share of bucket ``index``, which starts at byte ``start`` in each rank's copy."""
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
        return _Share(blocks, self._rank in summers, others, [self._signal_filled[rank] for rank in others])

    # -- a round

    def start(self, bucket: Bucket, scale: float) -> None:
        """Signal that this rank has filled ``bucket``, and sum buckets that all ranks have filled, without waiting."""
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
            share.missing = list(self._others)
            self._to_sum.append(share)
        else:
            share.missing = list(share.others)
        for semaphore in share.semaphores:
            self._add(semaphore)
        self._sum_what_is_filled()

    @waits()
    def wait(self, bucket: Bucket) -> None:
        """Wait until all ranks have summed their shares of ``bucket``.

        Raises:
            RuntimeError: another rank has ended, or did not arrive within the group's timeout.
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
            if not self._receive_all(first, what):
                self._sleep(first, what, bucket)
            elif what == _SUMMED:
                self._to_finish.popleft().under_way = False

    def close(self) -> None:
        """Release the memory. Ranks that still wait for this rank raise an error."""
        self._failed = self._failed or "this reducer is closed"
        self._shares = []
        self._semaphores.close()

    def _sum_what_is_filled(self) -> None:
        """Sum this rank's shares of those buckets that all ranks have filled."""
        while self._to_sum and self._receive_all(self._to_sum[0], _FILLED):
            share = self._to_sum.popleft()
            share.sum()
            share.missing = list(share.others)
            for semaphore in self._signal_summed:
                self._add(semaphore)

    def _receive_all(self, share: _Share, what: int) -> bool:
        """Receive the messages of kind ``what`` that have arrived. Return True if all have arrived."""
        messages, missing = self._messages[what], share.missing
        while missing and self._take(messages[missing[0]]):
            missing.pop(0)
        return not missing

    def _sleep(self, share: _Share, what: int, bucket: Bucket) -> None:
        """Wait for the next missing message of kind ``what``.

        Raises:
            RuntimeError: a rank has ended, or its message did not arrive within the group's timeout.
        """
        messages, missing = self._messages[what], share.missing
        start = time.monotonic()
        while not self._semaphores.wait(messages[missing[0]]):
            # While a bucket that this rank sums is not filled everywhere, no rank may have left. Later, a rank may
            # have sent its last message, to this rank too, and ended.
            needed = self._others if what == _FILLED else list(missing)
            gone = [other for other in needed if self._semaphores.is_gone(other)]
            silent = [other for other in gone if other not in missing or not self._take(messages[other])]
            if silent:
                self._fail(
                    f"{self._named(silent)} left (the process exited, or its reducer was closed or failed) while "
                    f"{self._named([self._rank])} waited for the reduction of bucket {bucket.index}"
                )
            for other in gone:
                missing.remove(other)
            if not missing:
                return
            limit = timeout_of(self._group)
            if time.monotonic() - start > limit:
                self._fail(
                    f"{self._named(missing)} did not join the reduction of bucket {bucket.index} within {limit:g} s, "
                    f"the timeout of the process group; {self._named([self._rank])} waited for it. All ranks must run "
                    "the same backwards. If some are slow, increase init_process_group(timeout=...)"
                )
        missing.pop(0)

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._semaphores.close()  # ranks that wait for this one raise an error too
        raise RuntimeError(reason)

    def _named(self, members: list[int]) -> str:
        """Return the global ranks of ``members`` as text for a message: ``"rank 3"``, ``"ranks 0, 2"``."""
        numbers = sorted(self._numbers[member] for member in members)
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _Share:
    """The part of a bucket that this rank sums over the ranks, and the state of the current reduction."""

    __slots__ = ("_blocks", "_factor", "is_mine", "missing", "others", "scale", "semaphores", "under_way")

    def __init__(self, blocks: list[Tensor], is_mine: bool, others: list[int], semaphores: list[c_void_p]) -> None:
        self.is_mine = is_mine  #: True if this rank sums a part of the bucket
        self.others = others  #: the other ranks that do
        self.semaphores = semaphores  #: of the message that this rank's copy is filled
        # for each block: all copies, the first, a list of the others, and the others as one tensor
        self._blocks = [(block, block[0], list(block[1:]), block[1:]) for block in blocks]
        self.scale = 1.0
        self._factor: Tensor | float = 1.0
        self.under_way = False
        self.missing: list[int] = []  #: ranks whose message has not arrived

    def scale_by(self, scale: float) -> None:
        """Set the factor by which later sums multiply every rank's copy."""
        self.scale = self._factor = scale
        if self._blocks and self._blocks[0][0].dtype in (torch.float32, torch.float64):
            # A number is converted to a tensor of this dtype at every multiplication, which takes 7 us. Narrower
            # dtypes are multiplied in float32, by the number itself.
            self._factor = torch.tensor(scale, dtype=self._blocks[0][0].dtype)

    def sum(self) -> None:
        """Sum the ranks' scaled copies in rank order, and write the sum to every copy."""
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
    """Return a tensor over ``length`` elements from byte ``start`` of the memory, which the tensor keeps alive."""
    if length == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=length, offset=start)


def timeout_of(group: comm.Group) -> float:
    """Return the timeout, in seconds, of CPU collectives of ``group``."""
    try:
        backend = (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a group without a backend for CPU tensors
        return default_pg_timeout.total_seconds()
