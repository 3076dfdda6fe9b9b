"""Functions that make forks and exits safe despite torch's threads, and that flush files before ``os._exit``.

A forked child must not inherit a lock that no thread will release, and no process may exit while one of torch's threads
still wants the interpreter.

Forks: torch's process groups have threads, and such a thread creates and deletes an interpreter state whenever it
releases a tensor that Python knows. Up to CPython 3.11 a forked child takes the lock around the list of these states
*before* it reinitializes that lock (``PyOS_AfterFork_Child``). If it was forked in the wrong microsecond, it waits for
a thread that does not exist. Whoever waits for the child, such as a rank for the first batch of a loader's worker,
waits forever. Since 3.12 the lock is reinitialized first.

A child must not collect its parent's garbage either: a process group among it would wait for threads that the child
does not have, or abort.

Exits: a gloo thread that has finished a collective needs the interpreter's lock if it is the last to release a tensor
that Python knows (``c10::TensorImpl::decref_pyobject``, which may not raise). If it requests the lock while the
interpreter shuts down, its stack is unwound, which C++ does not allow: "terminate called without an active exception",
SIGABRT. This race is torch's. It starts when the collective wakes its waiting thread, and lasts longer on a busy
machine. ``destroy_process_group`` does not end it, since containers and torch's own modules hold the group. So a
process with a group waits for these threads before the interpreter shuts down.
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
"""Prefix of the names of torch's own threads: ``pt_gloo_runloop``, ``pt_nccl_watchdg``, ..."""
PATIENCE = 1.0
"""Maximum number of seconds that a fork waits for torch's threads. They take microseconds on an idle machine."""
LAST_PATIENCE = 10.0
"""Maximum number of seconds that the exit of a process waits for torch's threads."""


def protect_forks() -> None:
    """Install the fork handlers that make later forks of this process safe. Repeated calls do nothing.

    With Python 3.11 or older on Linux, a fork waits until torch's threads sleep. The child does not collect its
    parent's garbage.
    """
    collector = _Collector()
    FORK_GARBAGE.at_fork(collector.disable, collector.freeze_in_child, collector.enable)
    # Since 3.12 the child reinitializes the lock before it takes it.
    if sys.version_info < (3, 12) and sys.platform == "linux":
        FORK_THREADS.at_fork(before=wait_for_torch_threads)


class _Collector:
    """Fork handlers that disable Python's garbage collector during a fork.

    In the child, other packages' fork handlers run first. They may create enough objects for a collection, which would
    free memory that is pinned for a device and abort the child.
    """

    def __init__(self) -> None:
        self._collects = False

    def disable(self) -> None:
        """Disable the collector before a fork."""
        self._collects = gc.isenabled()
        gc.disable()

    def enable(self) -> None:
        """Enable the collector again in the parent after a fork, if it was enabled before."""
        if self._collects:
            gc.enable()

    def freeze_in_child(self) -> None:
        """In the child, exempt the parent's objects from collection, and re-enable the collector if it was enabled."""
        gc.freeze()
        self.enable()


def settle_at_exit() -> None:
    """Install the exit handler that waits until torch's threads have released their last tensors.

    Repeated calls do nothing.
    """
    EXIT_THREADS.at_exit(settle)


def settle() -> None:
    """Wait until no thread of torch waits for the GIL, for at most :data:`LAST_PATIENCE` seconds.

    A thread that wants the interpreter wakes up in each switch interval, so two intervals show it, even if other
    threads of Python get the lock first. A thread that stays asleep waits for work or for other ranks. Collectives that
    nobody has waited for are not waited for here.
    """
    wait_for_torch_threads(2 * min(sys.getswitchinterval(), 0.1), LAST_PATIENCE)


def wait_for_torch_threads(quiet: float = 0.0002, patience: float | None = None) -> None:
    """Wait until torch's threads sleep, for at most ``patience`` seconds (default: :data:`PATIENCE`).

    A sleeping thread waits for work, for other ranks or for the interpreter, and does not hold the lock. If all threads
    sleep, and none wakes up within ``quiet`` seconds in which it could get the interpreter, none waits for that either.
    """
    if sys.platform != "linux":
        time.sleep(0.1)  # releases the interpreter's lock to them
        return
    until, before = time.monotonic() + (PATIENCE if patience is None else patience), None
    while time.monotonic() < until:
        now = _asleep()
        if now is not None and (now == before or not now):
            return
        before = now
        time.sleep(quiet)


def _asleep() -> dict[str, bytes] | None:
    """Return how often each of torch's threads has gone to sleep, by thread id. Return None if any is awake."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        # torch also names this one, in processes that it has started.
        if int(thread) == threading.get_native_id():
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
"""Classes of open files that buffer writes."""


def flush_open_files() -> None:
    """Flush the buffers of open files, which ``os._exit`` would discard.

    In a forked process only its own files are flushed. Its parent's files, which the parent flushes itself, are frozen
    (`lockstep.ground.fork_and_exit`) and so are not found.
    """
    with contextlib.suppress(MemoryError):
        for each in gc.get_objects():
            if type(each) in BUFFERED:
                with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, read only, or without a reader
                    each.flush()
