"""Rank processes that live for a test session: the same few processes run one distributed test after another.

    with RankPool(2) as pool:
        sums = pool.run(total, 3.0)     # total(3.0) on both ranks, in a fresh gloo group; results by rank

torch is imported once, in a nursery process that forks the ranks. A call on two ranks then costs some 40 ms,
most of them for making and destroying its process group. `run_threads` is cheaper: its ranks are threads of one
process, for tests of what is not process-wide.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.launch.environment import ReservedPort
from lockstep.launch.processes import stat_of
from lockstep.launch.spawn import pack
from tests.tools.pool_worker import LEAVE, STACKS_SIGNAL, PoolCall, PoolOutcome

# -- the pool ------------------------------------------------------------------------------------------------


GRACE = 2.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
PATIENCE = 10.0
"""Seconds for what the pool does itself: forking a rank, clearing up after a call."""

_OWN_FRAMES = ("tools/pool_worker.py", '"<string>"')


@dataclass(eq=False)
class _Worker:
    """One rank's process, as the pool sees it."""

    pid: int
    pipe: Connection
    stacks: IO[bytes]
    ready: bool = True
    status: int | None = None
    read: int = 0
    """Bytes of ``stacks`` that earlier calls wrote."""

    def read_stacks(self) -> str:
        self.stacks.seek(self.read)
        text = self.stacks.read().decode(errors="replace")
        self.read = self.stacks.tell()
        return "\n".join(line for line in text.splitlines() if not any(part in line for part in _OWN_FRAMES))


@dataclass
class _Progress:
    """What a call has heard from its ranks so far."""

    waiting: dict[int, _Worker]
    outcomes: dict[int, PoolOutcome] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    """Ranks whose process ended during the call, and how."""

    def failed(self) -> bool:
        return bool(self.died) or any(outcome.value is None for outcome in self.outcomes.values())


class RankPool:
    """A pool of rank processes on this machine.

    Args:
        size: how many ranks to start with; a call on a larger world adds what is missing. With 0 nothing waits here
            until the nursery has imported everything.
        preload: modules that the nursery imports beside torch: no rank imports them then, nor one that takes the
            place of a rank that failed.
        nursery: what `nursery` of another pool has given, perhaps in a process of which this one is a copy: ranks are
            forked from copies of that pool's nursery, which has imported everything.

    Each rank runs with one OpenMP thread. Between calls the ranks' environment, working directory, default
    dtype and torch flags are put back, and the process group is destroyed; every call starts from the same
    random states, other ones on every rank. A rank that failed is replaced by a fresh one.

    Needs ``fork``: Linux, macOS.
    """

    def __init__(self, size: int, preload: Sequence[str] = (), nursery: socket.socket | None = None) -> None:
        if size < 0:
            raise ValueError(f"RankPool(size={size!r}): give a number of ranks, or 0 to have calls add what they need")
        if not hasattr(os, "fork"):
            raise RuntimeError(f"RankPool needs os.fork, which {sys.platform} does not have")
        self._workers: list[_Worker] = []
        self._folder = tempfile.mkdtemp(prefix="lockstep-pool-")
        self._calls = 0
        self._owner = os.getpid()
        self._control: socket.socket | None = nursery
        self._nursery: subprocess.Popen[bytes] | None = None
        if nursery is None:
            self._control, self._nursery = _start_nursery(self._folder, preload)
        _open_pools.add(self)
        self._grow(size)

    @property
    def size(self) -> int:
        """The number of rank processes there are now."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return [worker.pid for worker in self._workers]

    def __call__(self, world: int) -> Ranks:
        """The pool's first ``world`` ranks: ``pool(2).run(fn)`` is ``pool.run(fn, world=2)``."""
        return Ranks(self, world)

    def run(
        self,
        fn: Callable[..., Any],
        *args: object,
        world: int | None = None,
        timeout: float = 60,
        group: bool = True,
    ) -> list[Any]:
        """Calls ``fn(*args)`` on every rank and returns what came back, by rank.

        They travel by cloudpickle: what a test module defines by value, what is installed by name. The ranks
        see the caller's working directory and ``sys.path``.

        Args:
            fn: what to call; the same on all ranks (``torch.distributed.get_rank()`` tells them apart).
            *args: its arguments.
            world: how many ranks take part; default: all of the pool.
            timeout: seconds until ranks that have not come back are ended.
            group: make a process group for the call (`pool_worker.chosen_backend`). Without it there is
                only the environment of a launcher, as there is with it; a group that the call makes itself is
                destroyed after it.

        Raises:
            RankFailure: a rank raised, died, or left a process or thread behind. It names the first rank to
                fail and has its traceback; the others were given ``GRACE`` seconds.
            RankTimeout: some ranks did not come back; it has their stacks.
        """
        if self._control is None:
            raise RuntimeError("this RankPool is closed")
        world = self.size if world is None else world
        if world < 1:
            raise ValueError(f"world={world!r}: a call takes at least one rank")
        body = _pickle(fn, args)
        self._heal(world)
        workers = dict(enumerate(self._workers[:world]))
        held = ReservedPort()
        self._send(workers, body, timeout, group, held.number)
        progress = _Progress(dict(workers))
        try:
            self._collect(progress, time.monotonic() + timeout)
            late = {rank: self._stacks(worker) for rank, worker in progress.waiting.items()}
        except BaseException:  # Ctrl-C, or pytest's own time limit
            for rank, worker in progress.waiting.items():
                print(f"rank {rank} was still in:\n{self._stacks(worker)}", file=sys.stderr)
            raise
        finally:
            held.close()
            for worker in progress.waiting.values():
                _kill(worker.pid)
                worker.status = -1
            for rank, outcome in progress.outcomes.items():
                if outcome.value is not None:
                    with contextlib.suppress(BrokenPipeError):  # it has died since: `_heal` will see it
                        workers[rank].pipe.send_bytes(LEAVE)
        if progress.failed():
            raise _failure(fn, world, progress, late)
        if late:
            raise rank_timeout(fn, world, timeout, late)
        return [pickle.loads(_value(progress.outcomes[rank])) for rank in range(world)]

    def close(self) -> None:
        """Ends all ranks and the nursery. Nothing of the pool is left afterwards; harmless when repeated."""
        _open_pools.discard(self)
        if self._control is None or self._owner != os.getpid():
            return
        self._control.close()
        self._control = None
        for worker in self._workers:
            worker.pipe.close()
            worker.stacks.close()
        self._workers.clear()
        if self._nursery is not None:
            _end(self._nursery)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one call ----------------------------------------------------------------------------------

    def _send(self, workers: dict[int, _Worker], body: bytes, timeout: float, group: bool, port: int) -> None:
        self._calls += 1
        world = len(workers)
        store = os.path.join(self._folder, f"group-{self._calls}") if group else None
        for rank, worker in workers.items():
            environ = launcher_environment(rank, world, port, f"pool-{self._calls}")
            call = PoolCall(rank, environ, os.getcwd(), list(sys.path), store, timeout, body)
            worker.ready = False
            with contextlib.suppress(BrokenPipeError):  # it died a moment ago: `_collect` will say so
                worker.pipe.send_bytes(pickle.dumps(call))

    def _collect(self, progress: _Progress, deadline: float) -> None:
        """Hears ranks until all have answered or the deadline comes; a failure brings the deadline near."""
        assert self._control is not None
        hurried = False
        while progress.waiting:
            if progress.failed() and not hurried:
                deadline, hurried = min(deadline, time.monotonic() + GRACE), True
            left = deadline - time.monotonic()
            if left <= 0:
                return
            by_pipe: dict[Any, int] = {worker.pipe: rank for rank, worker in progress.waiting.items()}
            for source in wait([self._control, *by_pipe], left):
                if source is self._control:
                    self._hear_nursery()
                else:
                    self._hear_rank(by_pipe[source], progress)

    def _hear_rank(self, rank: int, progress: _Progress) -> None:
        worker = progress.waiting[rank]
        try:
            progress.outcomes[rank] = pickle.loads(worker.pipe.recv_bytes())
            del progress.waiting[rank]
        except (EOFError, ConnectionResetError):
            while worker.status is None:  # the nursery has been told by the kernel, or will be at once
                self._hear_nursery()
            progress.died[rank] = _how_it_ended(worker.status)
            del progress.waiting[rank]

    def _stacks(self, worker: _Worker) -> str:
        """Where every thread of a rank is now."""
        worked = _worked(worker.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, STACKS_SIGNAL)
        text, deadline = "", time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = worker.read_stacks()
            if text and not more:
                return text
            text += more
        return text or f"(it gave no stack within a second: {_why_silent(worker.pid, worked)})"

    # -- the processes -----------------------------------------------------------------------------

    def _heal(self, world: int) -> None:
        """Waits until the ranks have cleared up after the last call; replaces and adds what is missing."""
        for index, worker in enumerate(self._workers[:world]):
            if worker.status is None and not worker.ready:
                with contextlib.suppress(EOFError, ConnectionResetError):
                    worker.ready = worker.pipe.poll(PATIENCE) and worker.pipe.recv_bytes() == b"ready"
            if worker.status is not None or not worker.ready or _has_news(worker.pipe):
                if worker.status is None:
                    _kill(worker.pid)
                worker.pipe.close()
                worker.stacks.close()
                self._workers[index] = self._fork()
        self._grow(world)

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            self._workers.append(self._fork())

    def _fork(self) -> _Worker:
        mine, its = socket.socketpair()
        stacks = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # lives as long as the rank
        pid = self._ask_nursery(b"rank", [its.fileno(), stacks.fileno(), 1, 2])
        its.close()
        return _Worker(pid, Connection(mine.detach()), stacks)

    def nursery(self) -> socket.socket:
        """The one end of a copy of this pool's nursery, by which another process may make a pool."""
        mine, its = socket.socketpair()
        self._ask_nursery(b"nursery", [its.fileno()])
        its.close()
        return mine

    def _ask_nursery(self, word: bytes, descriptors: list[int]) -> int:
        """The process that it forks."""
        assert self._control is not None
        socket.send_fds(self._control, [word], descriptors)
        while True:
            message = self._read_nursery()
            if message[0] == "born":
                return int(message[1])
            self._note_gone(message)

    def _hear_nursery(self) -> None:
        self._note_gone(self._read_nursery())

    def _read_nursery(self) -> tuple[Any, ...]:
        assert self._control is not None
        try:
            length = int.from_bytes(_receive(self._control, 4), "big")
            return tuple(pickle.loads(_receive(self._control, length)))
        except OSError as error:
            status = "unknown" if self._nursery is None else self._nursery.poll()
            self.close()
            raise RuntimeError(f"the pool's nursery process has ended (exit status {status})") from error

    def _note_gone(self, message: tuple[Any, ...]) -> None:
        _, pid, status = message
        for worker in self._workers:
            if worker.pid == pid and worker.status is None:
                worker.status = status


@dataclass(frozen=True)
class Ranks:
    """The first ``size`` ranks of a pool."""

    pool: RankPool
    size: int

    def run(self, fn: Callable[..., Any], *args: object, timeout: float = 60, group: bool = True) -> list[Any]:
        """`RankPool.run` on a world of ``size``."""
        return self.pool.run(fn, *args, world=self.size, timeout=timeout, group=group)


def launcher_environment(rank: int, world: int, port: int, run_id: str) -> dict[str, str]:
    """The variables that ``torchrun`` sets for one rank of one node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "LOCKSTEP_SUPERVISE": "0",  # the pool watches its ranks itself
    }


def pool_processes() -> frozenset[int]:
    """Process ids that belong to the open pools of this process: no leaks, whoever looks."""
    return frozenset(pool._nursery.pid for pool in _open_pools if pool._nursery is not None)


_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()


def _start_nursery(folder: str, preload: Sequence[str]) -> tuple[socket.socket | None, subprocess.Popen[bytes]]:
    mine, its = socket.socketpair()
    environ = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environ[name] = "1"  # threads that start at import would not survive the fork
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    begin = (
        "import gc; gc.disable(); "  # a quarter of the time that torch's import takes; `warm_up` ends it
        f"import sys; sys.path[:] = {[each for each in sys.path if isinstance(each, str)]!r}; "
        f"from tests.tools import pool_worker; pool_worker.main({its.fileno()}, {folder!r}, {tuple(preload)!r})"
    )
    nursery = subprocess.Popen(
        [sys.executable, "-c", begin],
        pass_fds=[its.fileno()],
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests; the nursery ends when its socket closes
    )
    its.close()
    return mine, nursery


def _end(nursery: subprocess.Popen[bytes]) -> None:
    """Wait until it has seen that its socket is closed."""
    try:
        nursery.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        nursery.kill()
        nursery.wait()


def _receive(source: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = source.recv(length - len(data))
        if not more:
            raise ConnectionResetError("the other end closed")
        data += more
    return data


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _has_news(pipe: Connection) -> bool:
    try:
        return pipe.poll()
    except (BrokenPipeError, ConnectionResetError):
        return False


def _value(outcome: PoolOutcome) -> bytes:
    assert outcome.value is not None
    return outcome.value


def _worked(process: int) -> float:
    """Seconds of a processor that a process has had; 0 where the system does not say."""
    try:
        fields = stat_of(process)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _why_silent(process: int, worked: float) -> str:
    """What the system says of a process that has not answered a signal: stopped, deep in the kernel, starved, or deaf.

    Args:
        process: its id.
        worked: `_worked` a second ago.
    """
    try:
        state = stat_of(process)[0]
        place = Path(f"/proc/{process}/wchan").read_text()
    except OSError as error:
        return str(error)
    kernel = "" if place in ("", "0") else f" in the kernel's {place}"
    return f"state {state}{kernel}, {_worked(process) - worked:.2f} s of a processor in it"


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"its process ended by itself with exit status {os.waitstatus_to_exitcode(status)}"


def _failure(fn: Callable[..., Any], world: int, progress: _Progress, late: dict[int, str]) -> RankFailure:
    failed = {rank: outcome for rank, outcome in progress.outcomes.items() if outcome.value is None}
    said = {rank: outcome.summary for rank, outcome in failed.items()} | progress.died
    # A rank that died could tell no time; what the others raise is mostly the echo of its death.
    first = min(progress.died) if progress.died else min(failed, key=lambda rank: failed[rank].ended)
    error = rank_failure(fn, world, first, said, failed[first].stack if first in failed else "", late)
    body = failed[first].error if first in failed else None
    if body is not None:
        with contextlib.suppress(Exception):  # a class that only the rank could import
            error.__cause__ = pickle.loads(body)
    return error


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Function and arguments as bytes; what the caller's own, not installed, module defines goes by value."""
    with contextlib.ExitStack() as stack:
        for module in _own_modules(fn, args):
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        body = io.BytesIO()
        pack((fn, args), body)
        return body.getvalue()


def _own_modules(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[ModuleType]:
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    seen = {"__main__"}  # by value in any case
    for thing in (fn, *args):
        while isinstance(thing, partial):
            thing = thing.func
        name = getattr(thing, "__module__", None) or type(thing).__module__
        module = sys.modules.get(name)
        if module is None or name in seen or name.startswith(("lockstep.", f"{__package__}.")):
            continue
        seen.add(name)
        file = getattr(module, "__file__", None)
        if file is not None and not os.path.abspath(file).startswith(installed):
            yield module


# -- errors of a call ----------------------------------------------------------------------------------------


class RankFailure(RuntimeError):
    """A call that failed on a rank: raised where the call was made.

    The exception of the first rank to fail, where it can be pickled, is its ``__cause__``.
    """

    def __init__(self, message: str, rank: int, stack: str) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""
        self.stack = stack
        """Its traceback, or the stacks of all its threads if it hung; empty if it died."""


class RankTimeout(RankFailure, TimeoutError):
    """A call that did not come back in time on some ranks; the message has their stacks."""


def rank_failure(
    fn: Callable[..., Any],
    world: int,
    first: int,
    said: Mapping[int, str],
    stack: str,
    late: Mapping[int, str],
) -> RankFailure:
    """The first cause in full, then a line for each of the others.

    Args:
        fn: what was called.
        world: on how many ranks.
        first: the rank that failed first.
        said: by rank, what went wrong there.
        stack: the first rank's traceback; empty if it has none.
        late: by rank, the stacks of those that never came back.
    """
    lines = [f"{name_of(fn)} failed on rank {first} of {world}: {said[first]}"]
    lines += [f"-- rank {first}:\n{stack.rstrip()}"] if stack else []
    others = sorted(set(said) - {first})
    lines += [f"-- rank {rank}, later: {said[rank].splitlines()[0]}" for rank in others]
    lines += [f"-- rank {rank} did not come back; it was in:\n{late[rank]}" for rank in sorted(late)]
    return RankFailure("\n".join(lines), first, stack)


def rank_timeout(fn: Callable[..., Any], world: int, seconds: float, late: Mapping[int, str]) -> RankTimeout:
    """Nobody failed, but the ranks in ``late`` (with their stacks) did not come back."""
    names = ", ".join(map(str, late))
    lines = [f"{name_of(fn)} on {world} ranks: no answer after {seconds:g} s from rank {names}"]
    lines += [f"-- rank {rank} was in:\n{stack}" for rank, stack in late.items()]
    return RankTimeout("\n".join(lines), min(late), late[min(late)])


def name_of(fn: Callable[..., Any]) -> str:
    """What a call is called in a message."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", fn))


# -- ranks as threads -----------------------------------------------------------------------------------------


_one_at_a_time = threading.Lock()

MEETING = 60.0
"""Seconds that ranks as threads get to meet, on a machine that has much else to do."""


def run_threads(world: int, fn: Callable[..., Any], *args: object, timeout: float = 30) -> list[Any]:
    """Calls ``fn(*args)`` on ``world`` threads, each a rank of one gloo group, and returns results by rank.

    The groups are real ones (gloo), subgroups included, so sums have the bits that processes get. What a
    process has once is shared by all ranks: random states, the environment, signals, the working directory,
    torch's flags. Code that touches those needs a `RankPool`.

    Example::

        def total() -> float:
            value = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(value)
            return value.item()

        assert run_threads(8, total) == [36.0] * 8

    Args:
        world: how many ranks.
        fn, *args: what to call on each, and its arguments, the same objects on every rank.
        timeout: seconds, for a collective and for the whole call, from when the ranks have met.

    Raises:
        RankFailure: a rank raised; the first to do so is the cause. The others' collectives fail when it leaves.
        RankTimeout: ranks did not come back; their threads cannot be ended, and go on as daemons.
    """
    if world < 1:
        raise ValueError(f"world={world!r}: a call takes at least one rank")
    store = dist.HashStore()
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}  # in the order of time
    met, meeting = threading.Semaphore(0), max(MEETING, timeout)

    def rank_main(rank: int) -> None:
        try:
            limit = datetime.timedelta(seconds=meeting)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            dist.barrier()  # who leaves at once must not be gone while another still connects to it
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout))
            met.release()
            results[rank] = fn(*args)
        except BaseException as error:
            failures[rank] = error
        finally:
            met.release()
            if dist.is_initialized():
                dist.destroy_process_group()

    with _one_at_a_time, _world_per_thread():
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        _await(threads, met, meeting, timeout)
        late = {rank: _stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    if failures:
        raise _first_failure(fn, world, failures, late)
    if late:
        raise rank_timeout(fn, world, timeout, late)
    return [results[rank] for rank in range(world)]


def _await(threads: list[threading.Thread], met: threading.Semaphore, meeting: float, timeout: float) -> None:
    """Wait until all have met, and then for so long until they have come back."""
    deadline = time.monotonic() + meeting
    for _ in threads:
        met.acquire(timeout=max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _first_failure(
    fn: Callable[..., Any], world: int, failures: dict[int, BaseException], late: dict[int, str]
) -> RankFailure:
    first, cause = next(iter(failures.items()))
    stack = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    said = {rank: _summary(error) for rank, error in failures.items()}
    error = rank_failure(fn, world, first, said, stack, late)
    error.__cause__ = cause
    return error


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(it has just ended)"


class _World(threading.local):
    """What torch.distributed keeps for a process (its groups), kept once per thread."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []


@contextmanager
def _world_per_thread() -> Iterator[None]:
    registry: Any = torch._C._distributed_c10d  # where C++ looks groups up by name
    before = distributed_c10d._world
    distributed_c10d._world = _World()  # type: ignore[assignment]
    registry._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        registry._set_thread_isolation_mode(False)
        distributed_c10d._world = before
