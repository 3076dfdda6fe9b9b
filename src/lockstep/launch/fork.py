"""``strategy="ddp_fork"``: a call, made in copies of the calling process, which share its memory until they write.

Nothing is imported, and nothing travels on the way in. What makes a copy unsafe, and what is done about it:

- A pool of OpenMP threads in the calling process (after the first operation on several threads): a copy does not have
  the threads, waits for them in its first parallel region, and hangs. libgomp ends its pool when asked to
  (``omp_pause_resource_all``), and both processes make new ones. Where it cannot be, copies compute on one thread.
- CUDA in use: its state does not survive a copy. Refused.
- A backward on a machine with GPUs: autograd has a thread for each, and refuses to work in a copy. Refused.
- A process group: its threads hold its connections. Refused.
- Threads of others (loggers, a notebook's kernel): a lock that one of them holds in that instant stays shut in the
  copies. Torch's are waited for; of the others nothing can be known. ``ddp_spawn`` has no such risk.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lockstep.cluster.local import rank_variables
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork import wait_for_torch_threads
from lockstep.launch.children import Children
from lockstep.launch.inherit import PARENT
from lockstep.launch.notes import Notes
from lockstep.launch.spawn import Call, SpawnLauncher, live

T = TypeVar("T")

HARD = 2
"""OpenMP's ``omp_pause_hard``: let go of everything."""

AUTOGRAD = "pt_autograd"
"""What autograd's threads for devices are called."""

_CUDA = (
    "CUDA is in use in it, and cannot be used in a copy: use strategy='ddp_spawn', or leave CUDA alone before the call"
)


class ForkLauncher(SpawnLauncher):
    """Calls functions in copies of this process, one per rank of the node, and brings rank 0's result back.

    Args:
        world: of the calling process, which stands in for local rank 0 and takes no part itself.
    """

    name = "ddp_fork"

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)`` in each of the processes; errors as of :meth:`SpawnLauncher.launch`.

        Raises:
            MisconfigurationException: a copy of this process could not work; the sentence says why.
        """
        reason = why_not()
        if reason is not None:
            raise _refusal(self.strategy, reason)
        return super().launch(function, *args, **kwargs)

    def start(self, children: Children, call: Call, result: IO[bytes], notes: Notes) -> None:
        """Copy this process for each rank of the node, and begin to watch them."""
        for stream in (sys.stdout, sys.stderr):  # else what waits in them is written once more by each copy
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        threads = torch.get_num_threads() if end_openmp_pools() else 1
        strategy = self.strategy
        bond = {PARENT: str(os.getpid())} if threading.current_thread() is threading.main_thread() else {}
        for local_rank in range(call.world.local_size):
            rank = replace(call.world, rank=call.world.rank + local_rank, local_rank=local_rank)
            environ = {**rank_variables(rank), **bond}

            def take(environ: Mapping[str, str] = environ) -> Call:
                if getattr(torch.cuda, "_is_in_bad_fork", bool)():
                    raise _refusal(strategy, _CUDA)
                torch.set_num_threads(threads)
                return call

            def body(number: int = rank.rank, environ: Mapping[str, str] = environ, take: Any = take) -> None:
                os.environ.update(environ)
                live(take, result.fileno(), notes.address, number)

            children.take(rank.rank, _fork(body, f"lockstep-rank-{rank.rank}"))
        children.watch()


def why_not() -> str | None:
    """Why copies of this process could not work; None if they can."""
    return obstacle(
        can_fork=hasattr(os, "fork"),
        cuda=torch.cuda.is_initialized(),
        group=dist.is_available() and dist.is_initialized(),
        threads=_thread_names(),
    )


def obstacle(can_fork: bool, cuda: bool, group: bool, threads: list[str]) -> str | None:
    """The first thing that makes copies of a process useless; None if there is none.

    Args:
        can_fork: whether the system has forks.
        cuda: whether CUDA is initialized.
        group: whether there is a process group.
        threads: names of the process' threads.
    """
    if not can_fork:
        return "this system has no forks: use strategy='ddp_spawn'"
    if cuda:
        return _CUDA
    if any(name.startswith(AUTOGRAD) for name in threads):
        return (
            "a backward has run in it on a machine with GPUs, and autograd's threads for them cannot be copied: use "
            "strategy='ddp_spawn', or leave all backwards to the ranks"
        )
    if group:
        return (
            "it has a process group, whose threads and connections cannot be copied: call "
            "torch.distributed.destroy_process_group() before, or use strategy='ddp_spawn'"
        )
    return None


def _refusal(strategy: str, reason: str) -> MisconfigurationException:
    return MisconfigurationException(f"strategy={strategy!r} copies the calling process, but {reason}.")


def _thread_names() -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # a system without /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                names.append(file.read().strip())
    return names


def end_openmp_pools() -> bool:
    """End the threads that libgomp keeps for this thread's parallel regions; the next region makes new ones.

    Other OpenMPs (LLVM's, Intel's) see to forks themselves.

    Returns:
        whether a copy of this process may compute on several threads.
    """
    paths = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(HARD) == 0 for path in sorted(paths))
    except (OSError, AttributeError):  # older than OpenMP 5
        return False


class Forked:
    """A copy of this process, with what of :class:`subprocess.Popen` is needed to watch it.

    Attributes:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        """Wait for its end; the exit code, or the negative number of the signal that killed it."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # somebody else in this process has waited for it
                    self._code = 0
            return self._code


def _fork(body: Callable[[], object], name: str) -> Forked:
    """Copy this process; the copy calls ``body`` and ends."""
    # multiprocessing's own process, of which only the child's side is used: it knows what has to be made anew there,
    # while its parent's side lets no two threads wait for a child
    process = multiprocessing.get_context("fork").Process(target=body, name=name, daemon=False)
    wait_for_torch_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_a_child(process)
    return Forked(pid)


def _be_a_child(process: Any) -> NoReturn:
    """The life of a copy. It never comes back: the lines that called it are the parent's."""
    code = 1
    try:
        gc.freeze()  # the parent's garbage is not ours to collect: it may wait for threads that are not here
        signal.set_wakeup_fd(-1)  # an event loop's of the parent, say
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # the parent's, as in any fresh process
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()  # the parent does these itself
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        code = process._bootstrap()
    finally:
        os._exit(code)
