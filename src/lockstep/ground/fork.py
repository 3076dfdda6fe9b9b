"""Forks beside torch's threads: a child must not begin its life with a lock that nobody will open.

The process groups of torch have threads of their own, and such a thread makes and drops a state of the interpreter
whenever it lets go of a tensor that Python knows. Up to CPython 3.11 a forked child takes the lock around the list of
those states *before* it makes that lock anew (``PyOS_AfterFork_Child``): forked in the wrong microsecond, it waits
for a thread that it does not have, and whoever waits for the child - a rank for the first batch of a loader's worker -
waits for ever. From 3.12 on the lock is made anew first.

Nor may a child collect its parent's garbage: a process group among it would wait for threads that the child does not
have, or break off over them.
"""

from __future__ import annotations

import gc
import os
import sys
import time

TORCH_THREADS = "pt_"
"""What torch's own threads are called: ``pt_gloo_runloop``, ``pt_nccl_watchdg``, ..."""
PATIENCE = 1.0
"""Seconds that a fork waits at most; a thread is done within microseconds, unless the machine is busy."""

_protected = False


def protect_forks() -> None:
    """Let each later fork of this process wait until torch's threads sleep, where it is needed, and let its child leave
    its parent's garbage alone; once."""
    global _protected
    if _protected or not hasattr(os, "register_at_fork"):
        return
    _protected = True
    os.register_at_fork(after_in_child=gc.freeze)
    if sys.version_info < (3, 12) and sys.platform == "linux":
        os.register_at_fork(before=wait_for_torch_threads)


def wait_for_torch_threads() -> None:
    """Wait until torch's threads of this process sleep, :data:`PATIENCE` seconds at most.

    A thread that sleeps waits for work, for other ranks or for the interpreter; none of these holds the lock. Seen
    asleep twice, with the interpreter given away between: one that waited for it has gone on meanwhile.
    """
    until, quiet = time.monotonic() + PATIENCE, 0
    while quiet < 2 and time.monotonic() < until:
        quiet = 0 if _some_run() else quiet + 1
        time.sleep(0.0001)


def _some_run() -> bool:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as file:
                line = file.read()
        except OSError:  # it has ended
            continue
        name, state = line[line.index(b"(") + 1 : line.rindex(b")")], line[line.rindex(b")") + 2 :][:1]
        if name.startswith(TORCH_THREADS.encode()) and state != b"S":
            return True
    return False
