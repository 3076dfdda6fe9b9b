"""Semaphores in memory that several processes share, and the locks by which they know one another alive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Callable

from lockstep.ground import comm
from lockstep.ground.pages import Pages, common_pages

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

    def __getitem__(self, index: int) -> ctypes.c_void_p:
        """The semaphore with this number: what `add`, `take` and `wait` are given."""
        return ctypes.c_void_p(self._begin + index * BYTES)

    def take(self, semaphore: ctypes.c_void_p) -> bool:
        """Take one off, if it is not at 0."""
        return self._try(semaphore) == 0

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
