"""The largest of each number over all ranks, begun at one boundary and read at a later one.

Ranks of one host write into a page that they share. One of them, the host's leader, exchanges what is largest there
with the leaders of other hosts: eight of them by messages to each other, more along a tree of eights. The messages go
over the connections that the ranks' group has, where that is a gloo group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from struct import Struct
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.pages import close_handle, common_pages, host_number
from lockstep.ground.rank import waits

BRANCHES = 8
"""Leaders that exchange what they have with each other."""
LIMIT = 1800.0
"""Seconds that a rank waits for the others of its host."""
_FIRST_TAG = 41_000  # of messages: each object has one of its own, and the user's have none of them
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1


class Work(Protocol):
    """A message that is under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


Send = Callable[[Tensor, int], Work]
Receive = Callable[[Tensor, int], Work]


def exchanged(place: int, count: int, row: Tensor, send: Send, receive: Receive) -> Generator[list[Work], None, Tensor]:
    """What one of several leaders does: yields messages to be waited for before it goes on; returns the maximum.

    Args:
        place: of this leader.
        count: of leaders.
        row: this leader's.
        send, receive: begin a message to or from the leader at a place.
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
    if step * BRANCHES < count:  # one of the others of its eight has more to do
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
    """The largest of each of several whole numbers over the ranks of a group. Collective, as all methods but `started`.

    Args:
        width: how many numbers.
        group: the ranks.

    Attributes:
        leaders: the leader of each rank's host.
        is_begun, is_started: whether there is a maximum that was not read; whether messages of it are under way.

    Example:
        >>> maximum = HostMaximum(2)
        >>> maximum.begin([3, -1]); maximum.start(); maximum.finish()
        [3, -1]
    """

    def __init__(self, width: int, group: comm.Group = None) -> None:
        world, rank = comm.world_size(group), comm.rank(group)
        self._ranks, self._group = comm.ranks_of(group), group
        told = comm.all_gather_tensor(torch.tensor([host_number(), _Tags.used]), group)
        hosts: list[int] = told[:, 0].tolist()
        self._tag = _FIRST_TAG + int(told[:, 1].max())
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
                self.leaders = list(range(world))
        self._page = None if pages is None else pages.memory
        close_handle(pages)
        self._locals = [each for each in range(world) if self.leaders[each] == self.leaders[rank]]
        self._slot, self._leads = self._locals.index(rank), self.leaders[rank] == rank
        self._heads = sorted(set(self.leaders))
        self._place = self._heads.index(rank) if self._leads else -1
        self._round, self._mine = 0, torch.zeros(width, dtype=torch.int64)
        self.is_begun = self.is_started = False
        self._playing: Generator[list[Work], None, Tensor] | None = None
        self._waiting: list[Work] = []
        self._own_group = self._connected()

    def _connected(self) -> comm.Group:
        """A gloo group of the leaders, where the ranks' own is none."""
        if not self._leads or len(self._heads) == 1 or comm.backend_of(self._group, "cpu") == "gloo":
            return None
        members = [self._ranks[head] for head in self._heads]
        made: comm.Group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        comm.barrier(made)  # one that leaves while another still connects would break that one's connecting
        return made

    def begin(self, row: Sequence[int]) -> None:
        """Tell this rank's numbers; nobody is waited for."""
        self._round += 1
        self.is_begun, self.is_started = True, False
        self._mine = torch.tensor(row, dtype=torch.int64)
        if self._page is not None:
            self._put(self._slot, row)

    @waits("agreeing with the other ranks")
    def start(self) -> None:
        """Let the host's leader send what its ranks have told; it waits until all of them have."""
        if not self.is_begun or self.is_started:
            return
        self.is_started = True
        if not self._leads:
            return
        rows = [self._mine]
        rows += [torch.tensor(self._read(slot, LIMIT)) for slot in range(1, len(self._locals))]
        send = self._group if self._own_group is None else self._own_group

        def to(tensor: Tensor, place: int) -> Work:
            return _there(dist.isend(tensor, self._ranks[self._heads[place]], send, self._tag))

        def of(tensor: Tensor, place: int) -> Work:
            return _there(dist.irecv(tensor, self._ranks[self._heads[place]], send, self._tag))

        self._playing = exchanged(self._place, len(self._heads), torch.stack(rows).amax(0), to, of)
        self._go_on()

    def _go_on(self) -> bool:
        """Take the next step of the exchange; False where it is over, and the host's ranks have been told."""
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
        """The largest of each number.

        Args:
            limit: seconds that messages and the host's ranks may take.

        Raises:
            RuntimeError: they took longer, or a rank is gone.
        """
        self.start()
        self.is_begun = self.is_started = False
        if not self._leads:
            return list(self._read(len(self._locals), limit))
        while self._playing is not None:
            for work in self._waiting:
                work.wait(timedelta(seconds=limit))
            self._go_on()
        found: list[int] = self._mine.tolist()
        return found

    def _put(self, slot: int, row: Sequence[int]) -> None:
        assert self._page is not None
        self._row.pack_into(self._page, self._offset(slot), self._round, *row, self._check(row))

    @waits("agreeing with the other ranks")
    def _read(self, slot: int, limit: float) -> tuple[int, ...]:
        """A row of this round, once it is there; its numbers may become visible one by one."""
        assert self._page is not None
        until, pause = time.monotonic() + limit, 0.0
        while True:
            number, *row, check = self._row.unpack_from(self._page, self._offset(slot))
            if number == self._round and check == self._check(row):
                return tuple(row)
            if time.monotonic() > until:
                raise RuntimeError(f"a rank of this host has not agreed with the others within {limit:g} s")
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)

    def _check(self, row: Sequence[int]) -> int:
        found = self._round
        for number in row:
            found = (found ^ number) * _MIX & _MASK
        return found

    def _offset(self, slot: int) -> int:
        return ((self._round & 1) * (len(self._locals) + 1) + slot) * self._row.size

    @waits()
    def close(self) -> None:
        """Give back the memory, and a group of the leaders, if there is one."""
        if self._page is not None:
            self._page.close()
            self._page = None
        self._playing, self._waiting = None, []
        if self._own_group is not None and comm.is_distributed():
            dist.destroy_process_group(self._own_group)
            self._own_group = None


class _Tags:
    used = 0


def _there(work: Work | None) -> Work:
    assert work is not None, "a rank that is no member of the group sends no messages"
    return work
