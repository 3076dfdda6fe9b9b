"""Flags that any rank may raise, such as stop or save, and that every rank sees at the same boundary.

A value that steers control flow must be the same on all ranks before it is used. Otherwise one rank leaves the loop
while another waits for it in a collective. An agreement costs no device sync and, on one host, no message.

Terms: a *window* is the stretch between two boundaries; a *boundary* is the end of a window. All ranks count windows
in the same way. A flag is a *bit*; `ConsensusFlags.register` assigns it to a name.

**Ranks on one host** (`_Shared`) share a page of memory with two cells for each bit, one for even and one for
odd windows. A rank that wants the bit in window ``w`` writes ``w`` into the cell of ``w``'s parity. At the
boundary the bit is raised if the cell holds ``w``. All ranks read the same value, because

1. a rank publishes before it contributes to a reduction of the window, and no reduction completes before every
   rank has contributed. A rank that reads at the boundary of ``w`` therefore reads after all writes for ``w``;
2. no rank is more than one window ahead. To complete the reduction of ``w + 1`` it needs the contribution of
   the slowest rank, which follows that rank's read for ``w``. While any rank still reads the cell of ``w``, the
   others write at most ``w + 1``, to the other cell. All ranks that write a cell in a window write the same
   number, so no write is lost.

A window without a reduction (``synced=False``) is therefore not settled; it is settled together with the windows
after it.

**Ranks on several hosts**, and ranks whose reductions do not block the CPU, use `_Messages`. (NCCL's reductions are
only queued when the loop continues, so point 1 does not hold.) They start a maximum over the ranks' requests every
k-th window and read it k windows later, when it has long arrived. All ranks wait for the same maximum at the same
boundary. A flag is seen k to 2k - 1 windows after its request. By default k depends on the time of a window on the
slowest rank and on the cost of an agreement, which travel with the requests. A signal must be handled before a
scheduler's patience ends, even if a window takes seconds.

Both channels agree on the number of the window in which the bit was wanted. So `ConsensusFlags.lower` answers every
earlier request from any rank, and later requests still count.

**The largest of each number over all ranks** (`HostMaximum`) is started at one boundary and read at a later one. The
ranks of a host write to a shared page. One of them, the host's leader, exchanges the host's maximum with the leaders
of other hosts: up to eight leaders send messages to each other, more use a tree with eight branches. The messages use
the connections of the ranks' group if that is a gloo group.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from struct import Struct
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.rank import waits
from lockstep.ground.shared_pages import close_handle, common_pages, host_number, on_one_host

BITS = 63
"""Number of flags that can be registered."""
MOST = 8
"""Maximum number of windows between two messages, which applies if windows are short."""
PACE = 50_000
"""Microseconds between two messages, as far as `MOST` allows."""
SHARE, RECENT = 10, 8
"""An agreement may take 1 / SHARE of the time. Its cost is that of the fastest of RECENT ones, in which no rank was
late."""
_PAGE = 4096
_ANY = 2 * BITS  # the two cells that are set if any bit is wanted in a window


class ConsensusFlags:
    """Flags that any rank can request, and that every rank sees at the same boundary.

    In every window, on every rank, the loop calls `publish` before the last backward that synchronizes, then `settle`
    at the boundary. `request` may be called at any time; `is_up` is read at a boundary. At world size 1 a request is
    seen at the next boundary.

    Args:
        group: the ranks. ``None`` is the default group, or this process alone if there is no group.
        every: number of windows between two messages across hosts. None: as many as take `PACE`, at most `MOST`.
        alone: this process agrees with itself, even if there is a group.

    Attributes:
        up: the raised bits, for code that checks them in every step.

    Example:
        >>> agreement = ConsensusFlags()
        >>> stop = agreement.register("stop")
        >>> agreement.request(stop)
        >>> agreement.publish(); agreement.settle(synced=True); agreement.is_up(stop)
        True
    """

    def __init__(self, group: comm.Group = None, *, every: int | None = None, alone: bool = False) -> None:
        self._group = group
        self._alone = alone or comm.world_size(group) == 1
        self._names: list[str] = []
        self._wanted: set[int] = set()  # requested on this rank, not yet answered
        self.up: set[int] = set()
        self._use(self._open(every))

    publish: Callable[[], None]
    """Publish this rank's requests. Call it before the rank contributes to the window's reduction."""

    def _use(self, channel: _Channel) -> None:
        self._channel = channel
        # Runs at each step: a method would be one more call.
        self.publish = partial(channel.publish, self._wanted)

    def _open(self, every: int | None) -> _Channel:
        if self._alone:
            return _Alone()
        # Only gloo's reductions block until they are done: the proof above needs that.
        if dist.get_backend(self._group) == "gloo" and on_one_host(self._group):
            pages = common_pages(self._group, _PAGE, on_disk=True)
            close_handle(pages)
            if pages is not None:
                return _Shared(pages.memory)
        return _Messages(self._group, every)

    # -- flags

    def register(self, name: str) -> int:
        """Return the bit of the flag ``name``. The first call for a name assigns the bit.

        Register all flags in the same order on all ranks.
        """
        if name in self._names:
            return self._names.index(name)
        if len(self._names) == BITS:
            raise ValueError(
                f"ConsensusFlags.register({name!r}): all {BITS} flags are already registered: {self._names}"
            )
        self._names.append(name)
        return len(self._names) - 1

    def request(self, bit: int) -> None:
        """Request that all ranks raise ``bit`` at the same later boundary."""
        if bit not in self.up:
            self._wanted.add(bit)

    def is_up(self, bit: int) -> bool:
        """Return True if ``bit`` is raised. All ranks get the same value between two boundaries."""
        return bit in self.up

    def lower(self, bit: int) -> None:
        """Lower ``bit`` on this rank, and discard all earlier requests. Must run on all ranks at the same boundary."""
        self.up.discard(bit)
        self._wanted.discard(bit)
        self._channel.void(bit)

    def now(self, bit: int) -> bool:
        """Raise ``bit`` on all ranks if any rank has requested ``bit``. Return True if ``bit`` is raised.

        This is a blocking collective, for ends of epochs.
        """
        if not self._alone:
            mine = torch.tensor([bit in self._wanted or bit in self.up], dtype=torch.int32)
            anyone = bool(comm.all_reduce(mine, "max", self._group).item())
        else:
            anyone = bit in self._wanted or bit in self.up
        if anyone:
            self.up.add(bit)
            self._wanted.discard(bit)
        return anyone

    # -- the loop's calls

    @waits()
    def settle(self, synced: bool) -> None:
        """At the boundary of a window, raise the bits that any rank has requested. May wait for other ranks.

        Args:
            synced: True if a reduction over all ranks that started after `publish` has completed in this window;
                the same on every rank.
        """
        raised = self._channel.settle(synced, self._wanted)
        if raised:
            self.up.update(raised)
            self._wanted.difference_update(raised)

    @waits()
    def close(self) -> None:
        """Release the shared memory or the process group. The flags' values do not change."""
        self._channel.close()
        self._use(_Alone())


class _Channel(Protocol):
    """Interface of a channel through which the ranks exchange which bits they have requested."""

    def publish(self, wanted: Iterable[int]) -> None: ...

    @waits()
    def settle(self, synced: bool, wanted: set[int]) -> Iterable[int]:
        """Return the bits to raise at this boundary: those that any rank has requested since they were last lowered."""
        ...

    def void(self, bit: int) -> None: ...

    @waits()
    def close(self) -> None: ...


class _Alone:
    """Channel for a run with a single rank, which sees its own requests at the next boundary."""

    def publish(self, wanted: Iterable[int]) -> None:
        pass

    @waits()
    def settle(self, synced: bool, wanted: set[int]) -> Iterable[int]:
        return tuple(wanted) if wanted else ()

    def void(self, bit: int) -> None:
        pass

    @waits()
    def close(self) -> None:
        pass


class _Shared:
    """Channel for ranks that are all on one host, with two cells of shared memory for each bit."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._cells = memoryview(page).cast("q")
        self._window = 1  # counts settled windows
        self._published = 0  # the last window in which publish was called
        self._voided = [0] * BITS  # requests from windows up to this one are answered

    def publish(self, wanted: Iterable[int]) -> None:
        window = self._published = self._window
        if wanted:
            parity = window & 1
            for bit in wanted:
                self._cells[2 * bit + parity] = window
            # Lets `settle` skip the search over all bits in a window without requests, which is the usual one.
            self._cells[_ANY + parity] = window

    @waits()
    def settle(self, synced: bool, wanted: set[int]) -> Iterable[int]:
        if not synced:
            return ()
        window = self._window
        self._window = window + 1
        parity = window & 1
        if self._cells[_ANY + parity] != window:
            return ()
        return [bit for bit in range(BITS) if self._cells[2 * bit + parity] == window and self._voided[bit] < window]

    def void(self, bit: int) -> None:
        # A request that arrives in this window after its publish is published again with the next one, so it is
        # not lost.
        self._voided[bit] = self._published

    @waits()
    def close(self) -> None:
        self._cells.release()
        self._page.close()


class _Messages:
    """Channel for ranks on several hosts. Every k-th window starts an exchange, which is read k windows later."""

    def __init__(self, group: comm.Group, every: int | None) -> None:
        self._paced = every is None
        self._every = every or 1
        self._window = 0  # counts boundaries
        self._next = self._every  # the boundary of the next message
        self._at = 0.0  # when the last one was sent
        self._costs: deque[float] = deque([0.0], maxlen=RECENT)  # seconds that the last messages took on this rank
        self._voided = [0] * BITS
        # for each bit the window in which it was wanted, or 0; then microseconds of a window and of an agreement
        self._maximum = HostMaximum(BITS + 2, group)

    def publish(self, wanted: Iterable[int]) -> None:
        pass

    @waits()
    def settle(self, synced: bool, wanted: set[int]) -> Iterable[int]:
        window = self._window = self._window + 1
        if window < self._next:
            self._maximum.start()  # by now the others of this host have published their requests
            return ()
        raised: list[int] = []
        now, since = time.monotonic(), self._every
        if self._maximum.has_started:
            *tags, duration, cost = self._maximum.finish()
            raised = [bit for bit, tag in enumerate(tags) if tag > self._voided[bit]]
            if self._paced and duration:
                self._every = pace(duration, cost)
        row = [0] * (BITS + 2)
        for bit in wanted.difference(raised):
            row[bit] = window
        if self._at:
            row[BITS] = max(1, int((now - self._at) * 1e6 / since))
            row[BITS + 1] = int(min(self._costs) * 1e6)
        self._at, self._next = now, window + self._every
        self._maximum.begin(row)
        # The next boundary reads it already, so there is no later one at which to start it.
        if self._every == 1:
            self._maximum.start()
        self._costs.append(time.monotonic() - now)
        return raised

    def void(self, bit: int) -> None:
        self._voided[bit] = self._window

    @waits()
    def close(self) -> None:
        if self._maximum.is_started and comm.is_distributed():
            with contextlib.suppress(RuntimeError):  # a rank that is gone cannot answer
                self._maximum.finish(limit=5.0)
        self._maximum.close()


def pace(duration: int, cost: int) -> int:
    """Return the number of windows from one exchange of requests between hosts to the next.

    Args:
        duration: microseconds of a window on the slowest rank.
        cost: microseconds of an agreement; it gets a tenth of the time or less.
    """
    return max(1, max(min(PACE, MOST * duration), SHARE * cost) // duration)


BRANCHES = 8
"""Number of leaders that exchange their numbers directly, which is the number of branches of the tree."""
LIMIT = 1800.0
"""Seconds that a rank waits for the other ranks on its host."""
# Tags of messages: each object has its own, and users' messages use none of them.
_FIRST_TAG = 41_000
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1


class Work(Protocol):
    """Handle of a message that is being sent or received."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


Send = Callable[[Tensor, int], Work]
Receive = Callable[[Tensor, int], Work]


def exchanged(place: int, count: int, row: Tensor, send: Send, receive: Receive) -> Generator[list[Work], None, Tensor]:
    """Exchange one row of numbers per leader (one rank per host), and return the rows' element-wise maximum.

    The generator yields lists of messages. The caller must wait for these before the next step.

    Args:
        place: index of this leader.
        count: number of leaders.
        row: this leader's numbers.
        send, receive: start a message to or from the leader at an index.
    """

    def get(others: Sequence[int]) -> tuple[Tensor, list[Work]]:
        rows = row.new_empty((len(others), *row.shape))
        return rows, [receive(rows[number], other) for number, other in enumerate(others)]

    step = 1
    while step * BRANCHES < count and place % (step * BRANCHES) == 0:
        rows, works = get(range(place + step, min(place + BRANCHES * step, count), step))
        yield works
        row = torch.cat([row.unsqueeze(0), rows]).amax(0)
        step *= BRANCHES
    if step * BRANCHES < count:  # another leader of these eight continues to the next level
        first = place - place % (step * BRANCHES)
        yield [send(row, first)]
        rows, works = get([first])
        yield works
        row = rows[0]
    else:
        others = [other for other in range(0, count, step) if other != place]
        rows, works = get(others)
        yield [*works, *(send(row, other) for other in others)]
        row = torch.cat([row.unsqueeze(0), rows]).amax(0)
    while step > 1:
        step //= BRANCHES
        yield [send(row, other) for other in range(place + step, min(place + BRANCHES * step, count), step)]
    return row


class HostMaximum:
    """Asynchronous element-wise maximum of integers over the ranks of a group.

    All methods are collective.

    Args:
        width: number of integers.
        group: the ranks.

    Attributes:
        leaders: for each rank, the leader of its host.
        has_started: True if numbers were published but the maximum has not been read.
        is_started: True if the exchange of messages has started.

    Example:
        >>> maximum = HostMaximum(2)
        >>> maximum.begin([3, -1]); maximum.start(); maximum.finish()
        [3, -1]
    """

    def __init__(self, width: int, group: comm.Group = None) -> None:
        world, rank = comm.world_size(group), comm.rank(group)
        self._ranks, self._group = comm.ranks_of(group), group
        of_ranks = comm.all_gather_tensor(torch.tensor([host_number(), _Tags.used]), group)
        hosts: list[int] = of_ranks[:, 0].tolist()
        # The largest count: a rank may be in more groups than another, and a tag must be new on both.
        self._tag = _FIRST_TAG + int(of_ranks[:, 1].max())
        _Tags.used += 1
        first: dict[int, int] = {}
        for place, each in enumerate(hosts):
            first.setdefault(each, place)
        self.leaders = [first[each] for each in hosts]
        self._row = Struct(f"={width + 2}q")  # number of the round, the numbers, and a checksum
        pages = None
        if len(first) < world:
            most = max(hosts.count(each) for each in first)
            pages = common_pages(group, 2 * (most + 1) * self._row.size, on_disk=True, leaders=self.leaders)
            if pages is None:
                # Without shared memory each rank is its own leader.
                self.leaders = list(range(world))
        self._page = None if pages is None else pages.memory
        close_handle(pages)
        self._locals = [each for each in range(world) if self.leaders[each] == self.leaders[rank]]
        self._slot, self._leads = self._locals.index(rank), self.leaders[rank] == rank
        self._heads = sorted(set(self.leaders))
        self._place = self._heads.index(rank) if self._leads else -1
        self._round, self._mine = 0, torch.zeros(width, dtype=torch.int64)
        self.has_started = self.is_started = False
        self._playing: Generator[list[Work], None, Tensor] | None = None
        self._waiting: list[Work] = []
        self._own_group: comm.Group = None
        if self._leads and len(self._heads) > 1 and comm.backend_of(group, "cpu") != "gloo":
            members = [self._ranks[head] for head in self._heads]
            self._own_group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            # A rank that leaves while another still connects would break that connection.
            comm.barrier(self._own_group)

    def begin(self, row: Sequence[int]) -> None:
        """Start a new round: publish this rank's row for the next maximum. Does not wait."""
        self._round += 1
        self.has_started, self.is_started = True, False
        self._mine = torch.tensor(row, dtype=torch.int64)
        if self._page is not None:
            self._put(self._slot, row)

    @waits("agreeing with the other ranks")
    def start(self) -> None:
        """Start the exchange between leaders (one rank per host). A leader first waits for its host's ranks."""
        if not self.has_started or self.is_started:
            return
        self.is_started = True
        if not self._leads:
            return
        rows = [self._mine]
        rows += [torch.tensor(self._read(slot, LIMIT)) for slot in range(1, len(self._locals))]
        send = self._group if self._own_group is None else self._own_group

        def to(tensor: Tensor, place: int) -> Work:
            return _in_flight(dist.isend(tensor, self._ranks[self._heads[place]], send, self._tag))

        def of(tensor: Tensor, place: int) -> Work:
            return _in_flight(dist.irecv(tensor, self._ranks[self._heads[place]], send, self._tag))

        self._playing = exchanged(self._place, len(self._heads), torch.stack(rows).amax(0), to, of)
        self._advance()

    def _advance(self) -> bool:
        """Run the next step of the exchange between leaders. Return False if no step is left.

        The maximum is then published on this host.
        """
        assert self._playing is not None
        try:
            self._waiting = next(self._playing)
        except StopIteration as over:
            self._mine, self._playing = over.value, None
            if self._page is not None:
                self._put(len(self._locals), self._mine.tolist())
            return False
        return True

    @waits("agreeing with the other ranks")
    def finish(self, limit: float = LIMIT) -> list[int]:
        """Wait for the other ranks and return the element-wise maximum.

        Args:
            limit: seconds to wait for each message, and for the ranks of this host.

        Raises:
            RuntimeError: the limit has passed, or a rank has ended.
        """
        self.start()
        self.has_started = self.is_started = False
        if not self._leads:
            return list(self._read(len(self._locals), limit))
        while self._playing is not None:
            for work in self._waiting:
                work.wait(timedelta(seconds=limit))
            self._advance()
        found: list[int] = self._mine.tolist()
        return found

    def _put(self, slot: int, row: Sequence[int]) -> None:
        assert self._page is not None
        self._row.pack_into(self._page, self._offset(slot), self._round, *row, self._check(row))

    @waits("agreeing with the other ranks")
    def _read(self, slot: int, limit: float) -> tuple[int, ...]:
        """Wait until a slot of the shared page contains a complete row of the current round. Return the row."""
        assert self._page is not None
        until, pause = time.monotonic() + limit, 0.0
        while True:
            # The checksum: a row is not written atomically, and half of it may be of the round before.
            number, *row, check = self._row.unpack_from(self._page, self._offset(slot))
            if number == self._round and check == self._check(row):
                return tuple(row)
            if time.monotonic() > until:
                raise RuntimeError(
                    f"another rank on this host has not written its values for an agreement within {limit:g} s. Check "
                    "whether that rank has ended or hangs"
                )
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)

    def _check(self, row: Sequence[int]) -> int:
        found = self._round
        for number in row:
            found = (found ^ number) * _MIX & _MASK
        return found

    def _offset(self, slot: int) -> int:
        # Two sets of rows in turn: a rank may publish the next round while another still reads this one.
        return ((self._round & 1) * (len(self._locals) + 1) + slot) * self._row.size

    @waits()
    def close(self) -> None:
        """Release the shared page, and the process group of the leaders if there is one."""
        if self._page is not None:
            self._page.close()
            self._page = None
        self._playing, self._waiting = None, []
        if self._own_group is not None and comm.is_distributed():
            dist.destroy_process_group(self._own_group)
            self._own_group = None


class _Tags:
    used = 0


def _in_flight(work: Work | None) -> Work:
    assert work is not None, "a rank outside of the group cannot send messages"
    return work
