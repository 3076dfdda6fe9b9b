"""The process that imports torch once and forks the ranks of a pool: started by `RankPool`.

It talks to the pool over one socket:

    pool -> nursery   "fork"                 two descriptors come along: a rank's pipe, a file for stacks
    nursery -> pool   ("born", pid)          the rank that was just forked
    nursery -> pool   ("gone", pid, status)  a rank ended, however it did, and its whole process group with it

When the pool's end closes, for whatever reason, every rank is killed and the nursery ends: nothing outlives
a test session, not even one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
from types import FrameType


def main(descriptor: int, folder: str) -> None:
    """Imports what every rank needs, then forks ranks until the pool goes away.

    Args:
        descriptor: this process's end of the socket.
        folder: the pool's scratch folder, removed at the end.
    """
    control = socket.socket(fileno=descriptor)
    warm_up()
    ears, mouth = socket.socketpair()
    for end in (ears, mouth):
        end.setblocking(False)

    def wake(number: int, frame: FrameType | None) -> None:
        """The wakeup descriptor does the work; Python needs a handler for the signal to reach it."""

    signal.signal(signal.SIGCHLD, wake)
    signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    living: set[int] = set()
    try:
        while True:
            ready, _, _ = select.select([control, ears], [], [])
            if ears in ready:
                with contextlib.suppress(BlockingIOError):
                    ears.recv(4096)
                for gone in reap(living):
                    send(control, gone)
            if control in ready:
                word, descriptors, _, _ = socket.recv_fds(control, 16, 2)
                if not word:
                    break
                pid = fork(descriptors, (control, ears, mouth))
                living.add(pid)
                send(control, ("born", pid))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone
    finally:
        signal.set_wakeup_fd(-1)
        for pid in living:
            kill_group(pid)
        shutil.rmtree(folder, ignore_errors=True)


def warm_up() -> None:
    """What every rank would import, once; collected and frozen, so that ranks neither copy nor walk it."""
    import gc

    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch.distributed

    import lockstep.testing.worker  # noqa: F401

    # torch imports its compiler, which takes over a second, when the first optimizer is made.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    gc.collect()
    gc.freeze()


def fork(descriptors: list[int], not_the_childs: tuple[socket.socket, ...]) -> int:
    """Forks one rank that serves the pool on its own pipe and never returns from here."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # also in the child: whoever comes first
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in not_the_childs:
            end.close()
        from lockstep.testing import worker

        worker.serve(*descriptors)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reap(living: set[int]) -> list[tuple[str, int, int]]:
    """The ranks that ended since the last look, with their wait status."""
    found = []
    for pid in sorted(living):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            living.discard(pid)
            kill_group(pid)  # its data loader workers, for example
            found.append(("gone", pid, status))
    return found


def kill_group(pid: int) -> None:
    """Ends a rank and all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def send(control: socket.socket, message: tuple[object, ...]) -> None:
    """One message with its length in front, as `RankPool` reads them."""
    body = pickle.dumps(message)
    control.sendall(len(body).to_bytes(4, "big") + body)
