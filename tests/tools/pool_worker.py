"""One rank of a pool, and the nursery: the process that imports torch once and forks the ranks.

A rank takes calls from its pipe, runs each in a fresh group, and puts everything back. The nursery is started by
`RankPool` and talks to it over one socket:

    pool -> nursery   "rank"                 descriptors come along: its pipe, a file for stacks, where it writes
    pool -> nursery   "nursery"              for the pool of another process, whose end of a socket comes along
    nursery -> pool   ("born", pid)          the rank, or nursery, that was just forked
    nursery -> pool   ("gone", pid, status)  a rank ended, however it did, and its whole process group with it

When the pool's end closes, for whatever reason, every rank is killed and the nursery ends: nothing outlives
a test session, not even one that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import io
import itertools
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from lockstep.ground.fork_and_exit import protect_forks, wait_for_torch_threads
from lockstep.ground.rank import forget_warnings
from lockstep.ground.seed import hand_down_seed
from lockstep.testing.devices import VARIABLE
from tests.tools import leaks

# A signal that neither clusters nor training programs use, so that no handler of theirs hides the stacks.
STACKS_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGXCPU)


LEAVE = b"leave"
"""What a rank is told when all have come to the end of a call."""

CALLS_PER_COLLECTION = 8
"""After so many calls a rank collects garbage.

A Trainer and its model refer to each other, so they, and the groups that they hold, wait for Python's collection of the
oldest generation, which is rare. Each group of gloo's has three threads, one of which wakes 100 times a second: 150
groups of earlier calls slow the whole machine.
"""


@dataclass(frozen=True)
class PoolCall:
    """One function call, as it travels to one rank."""

    rank: int
    environ: dict[str, str]
    """The launcher's variables, set for the time of the call."""
    directory: str
    """The caller's working directory."""
    path: list[str]
    """The caller's ``sys.path``."""
    store: str | None
    """A fresh file for the process group to meet at; None: the call makes its own group, or none."""
    timeout: float
    """Seconds, also for the collectives of the group."""
    body: bytes
    """The function and its arguments, by cloudpickle."""


@dataclass(frozen=True)
class PoolOutcome:
    """How a call ended on one rank."""

    ended: float
    """``time.monotonic()`` when the function returned or raised: the first failure causes the others."""
    value: bytes | None = None
    """What the function returned, by cloudpickle; None when it failed."""
    summary: str = ""
    """Type and message of the failure."""
    stack: str = ""
    """The traceback on that rank."""
    error: bytes | None = None
    """The exception itself, where it can be pickled."""


def serve(pipe_descriptor: int, stacks_descriptor: int) -> None:
    """Runs calls until one fails or the pool closes its end of the pipe."""
    _die_with_parent()
    faulthandler.register(STACKS_SIGNAL, file=stacks_descriptor, all_threads=True)
    pipe = Connection(pipe_descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        for number in itertools.count(1):
            call: PoolCall = pickle.loads(pipe.recv_bytes())
            before = leaks.snapshot()
            path = list(sys.path)
            outcome = run(call, before)
            pipe.send_bytes(pickle.dumps(outcome))
            if outcome.value is None:
                return  # a half-made group cannot be undone: the pool forks a fresh rank
            # torch's groups are made without a barrier: another rank may still connect to one that would leave now
            if pipe.recv_bytes() != LEAVE:
                return
            if dist.is_initialized():
                # A thread of gloo's that lets go of the group as the last one (the callback of a future may hold it)
                # would wait for its own end, which aborts the process.
                wait_for_torch_threads()
                dist.destroy_process_group()
            forget_meshes()
            leaks.restore_settings(before)
            sys.path[:] = path
            if number % CALLS_PER_COLLECTION == 0:
                gc.collect()
            pipe.send_bytes(b"ready")


def forget_meshes() -> None:
    """Empty torch's caches of what operations on DTensors do.

    A mesh equals one of an earlier call with as many ranks, so the caches would give a result that mesh, whose groups
    are gone: their names are unknown, or now those of other groups. They would also keep the groups' threads.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    # each by itself: an older torch lacks some of these caches
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        _gen_transform_infos.cache_clear()
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

        clear_redistribute_planner_cache()
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor._collective_utils import MeshTopoInfo

        MeshTopoInfo.build_from_mesh.cache_clear()


def run(call: PoolCall, before: leaks.Snapshot) -> PoolOutcome:
    """Runs one call under the environment of a launched rank; a leak of its own making is a failure too."""
    os.environ.update(call.environ)
    os.chdir(call.directory)
    sys.path[:] = call.path
    seed(call.rank)
    forget_warnings()
    try:
        if call.store is not None:
            world = int(call.environ["WORLD_SIZE"])
            protect_forks()
            dist.init_process_group(
                chosen_backend(),
                store=dist.FileStore(call.store, world),
                rank=call.rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=call.timeout),
            )
            dist.barrier()  # who leaves at once must not be gone while another still connects to it
        function, arguments = pickle.loads(call.body)
        value = function(*arguments)
        ended = time.monotonic()
        body = packed(value)
        del function, arguments, value
        _refuse_leaks(before)
        return PoolOutcome(ended, body)
    except BaseException as error:  # SystemExit and pytest's own outcomes included: the pool tells them on
        return failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _ToCPUPickler(cloudpickle.Pickler):
    """Writes tensors of a device as those of the CPU: who reads may not have it, or not under its number."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type not in ("cpu", "meta"):  # type: ignore[attr-defined]
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def packed(value: object) -> bytes:
    """What a call has returned, to travel to the process of the tests."""
    file = io.BytesIO()
    _ToCPUPickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _refuse_leaks(before: leaks.Snapshot) -> None:
    left = leaks.running_leaks(before)
    if left:
        leaks.end_children(before)
        raise RuntimeError("the call left something behind: " + "; ".join(left))


def failure(error: BaseException) -> PoolOutcome:
    """The outcome of a call that raised ``error``."""
    ended = time.monotonic()
    trace = error.__traceback__
    inner = trace.tb_next if trace is not None else None  # without `run` itself
    stack = "".join(traceback.format_exception(type(error), error, inner or trace))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        body: bytes | None = cloudpickle.dumps(error)
    except Exception:
        body = None
    return PoolOutcome(ended, None, summary, stack, body)


def chosen_backend() -> str:
    """What carries the messages of a test's ranks: gloo; on an accelerator that brings a backend that one, too.

    On one card for all ranks not NCCL, which wants a card for each, but copies on the host.
    """
    name = os.environ.get(VARIABLE, "cpu")
    if name == "cuda":
        from lockstep.testing import host_group

        host_group.register()
        return host_group.BACKENDS
    own = dist.Backend.default_device_backend_map.get(name, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{name}:{own}"


def seed(rank: int) -> None:
    """Every call starts from the same random states, other ones on every rank.

    Ranks that start alike would hide a broadcast that is missing.
    """
    torch.manual_seed(rank + 1)
    np.random.seed(rank + 1)
    random.seed(rank + 1)
    hand_down_seed(None)  # what an earlier call's `seed_everything` has left


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# -- the nursery: imports torch once and forks the ranks of a pool --------------------------------------------


def main(descriptor: int, folder: str, preload: Sequence[str] = ()) -> None:
    """Imports what every rank needs, then forks ranks until the pool goes away.

    Args:
        descriptor: this process's end of the socket.
        folder: the pool's scratch folder, removed at the end.
        preload: modules to import beside torch.
    """
    warm_up(preload)
    try:
        attend(socket.socket(fileno=descriptor))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attend(control: socket.socket) -> None:
    """Fork what a pool asks for, ranks or further nurseries, until it goes away."""
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
                word, descriptors, _, _ = socket.recv_fds(control, 16, 4)
                if not word:
                    break
                pid = fork(CHILDREN[word], descriptors, (control, ears, mouth))
                living.add(pid)
                send(control, ("born", pid))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone
    finally:
        signal.set_wakeup_fd(-1)
        for pid in living:
            kill_group(pid)


def serve_as(pipe: int, stacks: int, out: int, err: int) -> None:
    """A rank: it writes where the pool's process writes."""
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    serve(pipe, stacks)


def attend_as(descriptor: int) -> None:
    """A further nursery, for the pool of another process."""
    _die_with_parent()
    attend(socket.socket(fileno=descriptor))


CHILDREN: dict[bytes, Callable[..., None]] = {b"rank": serve_as, b"nursery": attend_as}


def warm_up(preload: Sequence[str] = ()) -> None:
    """What every rank would import, once; collected and frozen, so that ranks neither copy nor walk it."""
    # torch imports its compiler, which takes over a second, when the first optimizer is made.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def fork(child: Callable[..., None], descriptors: list[int], not_the_childs: tuple[socket.socket, ...]) -> int:
    """Forks a process that calls ``child`` with its descriptors, and never returns from here."""
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
        child(*descriptors)
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
