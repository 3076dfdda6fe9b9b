"""Forks and exits beside torch's threads, and open files of the script where a process does not end as Python does.

A forked child must not begin its life with a lock that nobody will open, and no process may end while such a thread
still wants the interpreter.

The process groups of torch have threads of their own, and such a thread makes and drops a state of the interpreter
whenever it lets go of a tensor that Python knows. Up to CPython 3.11 a forked child takes the lock around the list of
those states *before* it makes that lock anew (``PyOS_AfterFork_Child``): forked in the wrong microsecond, it waits
for a thread that it does not have, and whoever waits for the child - a rank for the first batch of a loader's worker -
waits for ever. From 3.12 on the lock is made anew first.

Nor may a child collect its parent's garbage: a process group among it would wait for threads that the child does not
have, or break off over them.

Exits: a thread of a gloo group that has finished a collective needs the interpreter's lock where it is the last that
lets go of a tensor that Python knows (``c10::TensorImpl::decref_pyobject``, which may not raise). Asked for while the
interpreter shuts down, the lock ends the thread by an unwinding of its stack that C++ does not let pass: "terminate
called without an active exception", SIGABRT. It is torch's race, open from the moment that the collective wakes who
waits for it; a busy machine, which lets that one go on first, makes it long, and ``destroy_process_group`` does not end
it, as containers and torch's own modules hold the group. So whoever has a group here waits, before the interpreter
shuts down, until these threads are done.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import threading
import time

from lockstep.ground.installed import EXIT_THREADS, FORK_GARBAGE, FORK_THREADS

TORCH_THREADS = "pt_"
"""What torch's own threads are called: ``pt_gloo_runloop``, ``pt_nccl_watchdg``, ..."""
PATIENCE = 1.0
"""Seconds that a fork waits at most; a thread is done within microseconds, unless the machine is busy."""
LAST_PATIENCE = 10.0
"""Seconds that the end of a process waits at most."""


def protect_forks() -> None:
    """Let each later fork of this process wait until torch's threads sleep, where it is needed, and let its child leave
    its parent's garbage alone; once."""
    collector = _Collector()
    FORK_GARBAGE.at_fork(collector.hold, collector.leave, collector.go_on)
    if sys.version_info < (3, 12) and sys.platform == "linux":
        FORK_THREADS.at_fork(before=wait_for_torch_threads)


class _Collector:
    """Python's collector of garbage at a fork. What others have registered runs first in the child, and may make enough
    objects for a collection: memory that is pinned for a device would be given back there, and the child be aborted."""

    def __init__(self) -> None:
        self._collects = False

    def hold(self) -> None:
        """Before a fork: collect nothing until the child has set aside what it must not."""
        self._collects = gc.isenabled()
        gc.disable()

    def go_on(self) -> None:
        """In the parent: as before."""
        if self._collects:
            gc.enable()

    def leave(self) -> None:
        """In the child: collect what comes from here on."""
        gc.freeze()
        self.go_on()


def settle_at_exit() -> None:
    """Let the end of this process wait until torch's threads have let go of their last collective's tensors; once."""
    EXIT_THREADS.at_exit(settle)


def settle() -> None:
    """Wait until none of torch's threads wants the interpreter any more, :data:`LAST_PATIENCE` seconds at most.

    One that wants it looks at it anew in each switch interval, and so counts as woken within two of them, also
    where other threads of Python's get it first. One that sleeps all the time waits for work, or for other ranks: a
    collective that nobody has waited for is not waited for here.
    """
    wait_for_torch_threads(2 * min(sys.getswitchinterval(), 0.1), LAST_PATIENCE)


def wait_for_torch_threads(quiet: float = 0.0002, patience: float | None = None) -> None:
    """Wait until torch's threads of this process sleep, ``patience`` seconds at most (:data:`PATIENCE`).

    A thread that sleeps waits for work, for other ranks or for the interpreter; none of these holds the lock. All seen
    asleep, and not woken for ``quiet`` seconds in which they could have the interpreter: they do not wait for that
    either.
    """
    if sys.platform != "linux":
        time.sleep(0.1)  # the interpreter's lock is theirs meanwhile
        return
    until, before = time.monotonic() + (PATIENCE if patience is None else patience), None
    while time.monotonic() < until:
        now = _asleep()
        if now is not None and (now == before or not now):
            return
        before = now
        time.sleep(quiet)


def _asleep() -> dict[str, bytes] | None:
    """How often each of torch's threads has been put to sleep, by thread; None where one is awake."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        if int(thread) == threading.get_native_id():  # torch names this one, too, in processes that it has started
            continue
        try:
            with open(f"/proc/self/task/{thread}/status", "rb") as file:
                fields = dict(line.split(b":\t", 1) for line in file.read().splitlines() if b":\t" in line)
        except OSError:  # it has ended
            continue
        if fields[b"Name"].startswith(TORCH_THREADS.encode()):
            if not fields[b"State"].startswith(b"S"):
                return None
            found[thread] = fields.get(b"voluntary_ctxt_switches", b"")
    return found


BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""What keeps text or bytes back that were written to it."""


def flush_open_files() -> None:
    """Write out what waits in the buffers of open files: ``os._exit`` would leave it there.

    Of a forked process these are its own files. Those of its parent, which writes them itself, are frozen
    (`lockstep.ground.fork_and_exit`), and not among what is found.
    """
    with contextlib.suppress(MemoryError):
        for each in gc.get_objects():
            if type(each) in BUFFERED:
                with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, read only, or nobody reads it
                    each.flush()
