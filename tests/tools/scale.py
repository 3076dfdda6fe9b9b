"""A run on a thousand nodes, played in one process: real connections between supervisors, and ranks that only wait.

What is played is what lockstep itself does between nodes. The ranks do not compute: what a supervisor would see of them
is made up, on a clock that goes as fast as the work is done. All else is the product's own code.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lockstep.cluster import rendezvous
from lockstep.cluster.limits import raise_limit
from lockstep.cluster.world import World
from lockstep.data.feed import Feed
from lockstep.data.source import Replicas
from lockstep.supervise import elsewhere, hang_monitor, hub
from lockstep.supervise.causes import Cause, Divergence
from lockstep.supervise.hang_monitor import HangMonitor
from lockstep.supervise.nodes import Nodes
from lockstep.supervise.snapshot import RUNS, SLEEPS, RankPosition, RankSnapshot
from lockstep.supervise.stack import Frame, Stack
from lockstep.supervise.trace_memory import Members, Note, shared

ADDRESS = "127.0.0.1"
BUSY = Stack((Frame("/home/me/train.py", 88, "on_validation_epoch_end"),))
WAITING = Stack(tuple(Frame("/home/me/train.py", 40 + depth, f"call_{depth}") for depth in range(24)))
"""Stacks of ranks: of the one that is late, and of those that wait for it."""

SECONDS = 120.0
"""Seconds of this machine after which what should have come is given up."""


@dataclass(frozen=True)
class Cost:
    """What one part of a run took.

    Attributes:
        part: its name.
        nodes, ranks: of the run.
        messages, size: that node 0 sent or got, and their bytes.
        most: messages that any other node sent or got.
        seconds: of the run's clock that it lasted; of this machine where nothing is simulated but the nodes.
        busy: seconds of a processor that node 0 worked.
    """

    part: str
    nodes: int
    ranks: int
    messages: int
    size: int
    most: int
    seconds: float
    busy: float


class SimulatedClock:
    """Stands in for the module ``time`` where ranks are watched.

    Attributes:
        now: the run's clock.
        off: seconds by which the clock of each thread's node is off.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.off: dict[int | None, float] = {}

    def monotonic(self) -> float:
        """The clock of the node whose thread asks."""
        return self.now + self.off.get(threading.get_ident(), 0.0)

    def thread_time(self) -> float:
        """What this thread has worked."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Nothing has to be waited for."""


class CountingConnection(hub._Connection):
    """A connection of a node that counts what goes out and what comes in.

    Attributes:
        messages, size: both ways, and their bytes.
        told: messages that the other end has to take in.
        heard: messages that this end has taken in.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages = self.size = self.told = self.heard = 0

    def put(self, topic: str, text: bytes, newest: bool = False) -> bool:
        found = super().put(topic, text, newest)
        self.messages += found
        self.told += found and topic != "welcome"  # which is read before there is a connection
        self.size += len(text) * found
        return found


class CountingHub(hub.Hub):
    """A node's end of the hub that knows what its thread has done.

    Attributes:
        served: all its connections, those that are over included.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: list[CountingConnection] = []
        self._worked = 0.0
        self._hellos = self._size_of_hellos = 0

    @property
    def counted(self) -> tuple[int, int]:
        """Messages and bytes so far."""
        messages = self._hellos + sum(each.messages for each in self.served)
        return messages, self._size_of_hellos + sum(each.size for each in self.served)

    @property
    def worked(self) -> float:
        """Seconds of a processor that its thread has had."""
        thread = self._thread
        if not thread.is_alive() or thread.ident is None:
            return self._worked
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def join(self, address: str, port: int, token: str) -> bool:
        hello = {"token": token, "node": self.node, "host": self.host}
        self._hellos, self._size_of_hellos = 2, len(hub.line_of(hello)) + len(hub.WELCOME)
        return super().join(address, port, token)

    def kill(self) -> None:
        """End as a process that is killed: without a word."""
        self._end()

    def _run(self) -> None:
        super()._run()
        self._worked = time.thread_time()

    def _identify(self, opened: socket.socket, hello: dict[str, Any] | None) -> hub._Connection | None:
        self._hellos += 1
        self._size_of_hellos += len(hub.line_of(hello or {}))
        return super()._identify(opened, hello)

    async def _serve(self, connection: hub._Connection) -> None:
        assert isinstance(connection, CountingConnection)
        self.served.append(connection)
        await super()._serve(connection)

    def _dispatch(self, connection: hub._Connection, message: dict[str, Any]) -> None:
        assert isinstance(connection, CountingConnection)
        connection.messages += 1
        connection.size += len(hub.line_of(message))
        super()._dispatch(connection, message)
        connection.heard += 1


class SimulatedMonitor(HangMonitor):
    """Watches ranks that are made up."""

    def __init__(self, hub: CountingHub, size: int, ranks: Callable[[RankPosition], RankSnapshot]) -> None:
        super().__init__(hub, size)
        self._ranks = ranks

    def _snapshot(self, position: RankPosition, still: float, now: float) -> RankSnapshot:
        return replace(self._ranks(position), stack=None)

    def _with_stack(self, snapshot: RankSnapshot, now: float) -> RankSnapshot:
        return self._ranks(snapshot.position)


@dataclass
class _Node:
    nodes: Nodes
    hub: CountingHub
    monitor: SimulatedMonitor
    lost: list[str] = field(default_factory=list)


class SimulatedRun:
    """Supervisors of many nodes, each connected with node 0 as in a run.

    Args:
        nodes: how many, from 2.
        ranks_per_node: ranks of each.
        hang_timeout: of the Trainer, in seconds.
        off: of some nodes, seconds by which their clocks are off.
        silent: of some nodes, the seconds of a `wait` in which they say nothing.

    Attributes:
        clock: of the run.
        told: what has been told of ranks that wait, with the moment on the run's clock.

    Example::

        with SimulatedRun(nodes=128) as run:
            print(run.start())
            print(run.wait(600, late=17), run.told)
            print(run.fail(5))
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int = 8,
        hang_timeout: float = 60.0,
        off: Mapping[int, float] | None = None,
        silent: Mapping[int, range] | None = None,
    ) -> None:
        if nodes < 2:
            raise ValueError(f"SimulatedRun(nodes={nodes}): give at least 2")
        self._off, self._silent = off or {}, silent or {}
        self._count, self._local, self._limit = nodes, ranks_per_node, hang_timeout
        self.clock = SimulatedClock()
        self.told: list[tuple[float, str]] = []
        self._everyone: Members = shared(tuple(range(self.ranks)))
        self._late: int | None = None
        self._since = 0.0
        self._notes: tuple[Note, ...] = ()
        self._gone: set[int] = set()
        self._nodes: list[_Node] = []
        self._patches = contextlib.ExitStack()

    @property
    def ranks(self) -> int:
        """Of the run."""
        return self._count * self._local

    @property
    def lost(self) -> list[str]:
        """What nodes that are there have said of others that were gone."""
        return [words for node in self._there for words in node.lost]

    @property
    def _there(self) -> list[_Node]:
        return [node for number, node in enumerate(self._nodes) if number not in self._gone]

    @property
    def decided(self) -> list[str]:
        """The words of the first cause as each node that is there knows it; "" where it does not."""
        return ["" if node.nodes.decided is None else node.nodes.decided.words for node in self._there]

    def __enter__(self) -> SimulatedRun:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._patches.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        raise_limit()
        for watches in (hang_monitor, elsewhere):
            self._patches.enter_context(mock.patch.object(watches, "time", self.clock))
        self._patches.enter_context(mock.patch.object(hang_monitor, "_print", self._say))
        self._patches.enter_context(mock.patch.object(hub, "_Connection", CountingConnection))
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self._patches.close()

    # -- parts of a run ----------------------------------------------------------------------------------------

    def start(self) -> Cost:
        """All nodes join node 0."""
        with self._measured("start") as found:
            for number in range(self._count):
                self._nodes.append(self._node(number))
            zero = self._nodes[0].nodes
            port, token = zero.open(ADDRESS)
            with ThreadPoolExecutor(16) as pool:
                joined = list(pool.map(lambda node: self._join(node, port, token), self._nodes[1:]))
            for number, off in self._off.items():
                self.clock.off[self._nodes[number].hub._thread.ident] = off
            if not all(joined):
                raise RuntimeError(f"{joined.count(False)} of {self._count} nodes could not join node 0")
        return found[0]

    def wait(self, seconds: int, late: int) -> Cost:
        """All ranks wait in an all-reduce for one that is busy, for so many seconds of the run's clock."""
        self._late, self._since = late, self.clock.now
        past = [self._note(number, 0.0, 0.5) for number in range(40, 25, -1)]
        self._notes = (self._note(41, self._since, None), *past)
        with self._measured("wait") as found:
            for second in range(seconds):
                self.clock.now += hang_monitor.PERIOD
                awake = [node for number, node in enumerate(self._nodes) if second not in self._silent.get(number, ())]
                for node in self._nodes[1:]:
                    if node in awake:
                        self._look(node)
                self._settle()
                self._look(self._nodes[0])
                self._settle()
        self._late = None
        return found[0]

    def fail(self, rank: int) -> Cost:
        """A rank fails; then all other nodes, which have not heard of it yet, claim that their connections broke."""
        first = rank // self._local
        with self._measured("failure") as found:
            self._nodes[first].nodes.claim(self._cause(rank, "ValueError: made up"))
            self._until(lambda: bool(self.decided[0]), "the first cause on node 0")
            for number, node in enumerate(self._nodes):
                if number != first:
                    node.nodes.claim(self._cause(number * self._local, "RuntimeError: Connection closed by peer"))
            self._until(lambda: all(self.decided), "the first cause on all nodes")
        return found[0]

    def lose(self, numbers: Sequence[int]) -> Cost:
        """The supervisors of these nodes are killed: their connections close without a farewell."""
        with self._measured("lost node") as found:
            for number in numbers:
                self._nodes[number].hub.kill()
            self._gone.update(numbers)
            self._until(lambda: all(self.decided), "the lost node on all others")
        return found[0]

    def end(self) -> Cost:
        """All nodes say farewell, node 0 last."""
        with self._measured("end") as found:
            self._close()
        return found[0]

    # -- how it is played --------------------------------------------------------------------------------------

    def _node(self, number: int) -> _Node:
        found: _Node

        def put(event: str, what: Any) -> None:
            if event in ("lost", "silent"):
                found.lost.append(str(what))
            if event == "claim":
                found.nodes.handle_claim(what)
            elif event == "first":
                found.nodes.accept(what)
            elif event == "lost":
                found.nodes.handle_loss(what)

        with mock.patch("lockstep.supervise.hub.Hub", CountingHub):
            nodes = Nodes(number, self._count, put, lambda first: None)
        assert isinstance(nodes.hub, CountingHub)
        found = _Node(nodes, nodes.hub, SimulatedMonitor(nodes.hub, self.ranks, self._rank))
        return found

    def _join(self, node: _Node, port: int, token: str) -> bool:
        node.hub.listen("first", lambda number, body: node.nodes._put("first", body))
        return node.hub.join(ADDRESS, port, token)

    def _cause(self, rank: int, reason: str) -> Cause:
        return Cause(rank, self.clock.now, reason, "/home/me/train.py:40", "")

    def _rank(self, position: RankPosition) -> RankSnapshot:
        """A rank as its supervisor sees it, asked for its stack."""
        off = self._off.get(position.rank // self._local, 0.0)
        now, notes = self.clock.now + off, self._notes
        if off:
            notes = tuple(
                replace(
                    note,
                    entered=note.entered + off,
                    left=None if note.left is None else note.left + off,
                    done=None if note.done is None else note.done + off,
                )
                for note in notes
            )
        if position.rank == self._late:
            return RankSnapshot(position.rank, now, position, RUNS, stack=BUSY, notes=notes[1:])
        still = self.clock.now - self._since
        return RankSnapshot(position.rank, now, position, SLEEPS, still, notes=notes, stack=WAITING)

    def _note(self, number: int, entered: float, left: float | None) -> Note:
        what = ("all_reduce", "0", self._everyone, "float32 (1000000,) SUM", 1_000_000)
        where = ("/home/me/train.py:40", "training_step", "training_step", 7, -1)
        return Note(number, number, *what, *where, entered, left, left, True)

    def _look(self, node: _Node) -> None:
        first = node.nodes._node * self._local
        positions = {
            rank: RankPosition(rank, 0.0, 1, True, "/home/me/fit.py:7", os.getpid(), hang_timeout=self._limit)
            for rank in range(first, first + self._local)
        }
        began, off = time.thread_time(), self._off.get(node.nodes._node, 0.0)
        self.clock.off[threading.get_ident()] = off
        found = node.monitor.check(positions, {}, self.clock.now + off)
        self.clock.off.pop(threading.get_ident())
        if node is self._nodes[0]:
            self._looked += time.thread_time() - began
        if found is not None:
            raise RuntimeError(f"a healthy run was to be ended: {found}")

    def _settle(self) -> None:
        """Until all that nodes have sent is taken in: the run's clock stands still while this machine is busy."""
        zero = self._nodes[0].hub
        ends = [(zero._connections.get(node.hub.node), node.hub._connections.get(0)) for node in self._nodes[1:]]
        open_ = [end for pair in ends if None not in pair for end in pair if isinstance(end, CountingConnection)]

        def is_quiet() -> bool:
            heard = sum(end.heard for end in open_)  # first: what is sent and heard between the two sums does not hide
            return sum(end.told for end in open_) == heard

        self._until(is_quiet, "what nodes send")

    def _say(self, found: Divergence, kill: float) -> None:
        self.told.append((self.clock.now, str(found)))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{self._count} nodes: {what} did not come within {SECONDS:g} s")
            time.sleep(0.001)

    def _close(self) -> None:
        nodes, self._nodes = self._nodes, []
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda node: node.nodes.close(), nodes[1:]))
        for node in nodes[:1]:
            until = time.monotonic() + SECONDS
            while 0 not in self._gone and node.hub.nodes and time.monotonic() < until:
                time.sleep(0.001)
            node.nodes.close()
        self._ended = nodes

    @contextlib.contextmanager
    def _measured(self, part: str) -> Iterator[list[Cost]]:
        found: list[Cost] = []
        before = {number: node.hub.counted for number, node in enumerate(self._nodes)}
        self._looked, worked = 0.0, self._nodes[0].hub.worked if self._nodes else 0.0
        began, moment = time.monotonic(), self.clock.now
        yield found
        nodes = self._nodes or self._ended
        counts = []
        for number, node in enumerate(nodes):
            (messages, size), (sent, bytes_sent) = node.hub.counted, before.get(number, (0, 0))
            counts.append((messages - sent, size - bytes_sent))
        seconds = self.clock.now - moment or time.monotonic() - began
        busy = nodes[0].hub.worked - worked + self._looked
        most = max(messages for messages, _ in counts[1:])
        found.append(Cost(part, self._count, self.ranks, *counts[0], most, seconds, busy))


# -- the rendezvous -----------------------------------------------------------------------------------------


class MemoryStore:
    """What ranks ask of torch's store, in memory, with a count of each rank's requests."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._there: dict[str, threading.Event] = {}

    def there(self, key: str) -> threading.Event:
        """Whether a key is there."""
        with self.lock:
            return self._there.setdefault(key, threading.Event())


class StoreClient:
    """A rank's way to a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.requests = 0

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.requests += 1
        self._store.values[key] = value.encode()
        self._store.there(key).set()

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        self.requests += 1
        return self._store.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        self.requests += 1
        with self._store.lock:
            number = int(self._store.values.get(key, b"0")) + amount
            self._store.values[key] = str(number).encode()
            return number

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        self.requests += 1
        return all(key in self._store.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        self.requests += 1
        return [self._store.values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all are there."""
        import torch.distributed as dist

        self.requests += 1
        until = time.monotonic() + timeout.total_seconds()
        for key in keys:
            if not self._store.there(key).wait(max(0.0, until - time.monotonic())):
                raise dist.DistStoreError("timed out")


def meet(ranks: int) -> Mapping[str, int]:
    """Ranks of an elastic run agree on the number of their attempt.

    Args:
        ranks: each is a node of its own.

    Returns:
        requests of rank 0, and the most that another rank has made.
    """
    store = MemoryStore()
    clients = [StoreClient(store) for _ in range(ranks)]

    def agree(rank: int) -> int:
        world = World(rank, ranks, 0, 1, rank, ranks, ADDRESS, 1)
        return rendezvous._agree_on_attempt(clients[rank], world, timedelta(seconds=SECONDS))  # type: ignore[arg-type]

    with mock.patch.object(rendezvous, "LOOK", SECONDS), ThreadPoolExecutor(ranks) as pool:
        numbers = set(pool.map(agree, range(ranks)))
    if numbers != {1}:
        raise RuntimeError(f"{ranks} ranks did not agree on their attempt: {numbers}")
    return {"rank 0": clients[0].requests, "another rank": max(client.requests for client in clients[1:])}


# -- a sampler of the user's -----------------------------------------------------------------------------------


class InOrder(Sampler[int]):
    """A sampler as users write them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def draw(ranks: int) -> int:
    """Calls of functions, Python's own among them, by which one of many ranks draws a micro-batch by a user's sampler.

    Args:
        ranks: how many.
    """
    length = GLOBAL_BATCHES * ranks * 2
    loader = DataLoader(TensorDataset(torch.arange(length)), 2, sampler=InOrder(length))
    replicas = Replicas(ranks // 2, ranks, lambda tensor: tensor.expand(ranks, *tensor.shape))
    feed = Feed.train(loader, replicas=replicas, seed=1)
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        feed.begin(0)
        drawn = sum(1 for window in feed.windows(1) for _ in window)
    finally:
        sys.setprofile(None)
    return found // drawn


GLOBAL_BATCHES = 16
"""Of the epoch that is drawn."""
