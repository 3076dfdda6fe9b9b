"""Ranks that put together what they have logged, and hosts that agree, played in one process: messages are counted.

The way of the messages and what is computed on it are lockstep's own. What is sent waits in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.agreement import exchanged
from lockstep.loop.logged_rows import Rows, shown_value


class _Received:
    """Stands for the work of a message that has come."""

    def wait(self) -> None:
        """It has come."""


class CountedMessages:
    """Stands in for torch's messages among ranks that run one after another, from the last to the first.

    Args:
        ranks: how many.

    Attributes:
        messages, size: that each rank has sent or got, and their bytes.
        depth: messages of the longest chain, each of which waits for the one before.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank, self.depth = ranks, ranks - 1, 0
        self.messages: dict[int, int] = defaultdict(int)
        self.size: dict[int, int] = defaultdict(int)
        self._waiting: dict[tuple[int, int], deque[tuple[Tensor, int]]] = defaultdict(deque)
        self._chain: dict[int, int] = defaultdict(int)
        self.result: Tensor | None = None

    def send(self, tensor: Tensor, to: int, *_: Any) -> None:
        """Keep a message for a rank."""
        self._waiting[self.rank, to].append((tensor.clone(), self._chain[self.rank]))
        self._count(self.rank, tensor.nbytes)

    def irecv(self, tensor: Tensor, source: int, *_: Any) -> _Received:
        """Get one that waits."""
        sent, chain = self._waiting[source, self.rank].popleft()
        tensor.copy_(sent)
        self._count(self.rank, tensor.nbytes)
        # a rank takes in one after another
        self._chain[self.rank] = max(self._chain[self.rank], chain) + 1
        return _Received()

    def broadcast(self, tensor: Tensor, root: int, *_: Any) -> None:
        """Along a binomial tree, as gloo sends; it runs when rank 0 is there, the last of all."""
        if self.rank != root:
            return
        self.result = tensor.clone()
        bits = math.ceil(math.log2(self.ranks))
        for rank in range(self.ranks):
            children = sum(1 << bit > rank and rank + (1 << bit) < self.ranks for bit in range(bits))
            for _number in range(children + (rank > 0)):
                self._count(rank, tensor.nbytes)
        self.depth = self._chain[0] + bits

    def _count(self, rank: int, size: int) -> None:
        self.messages[rank] += 1
        self.size[rank] += size


def reduce_logged(ranks: int, names: int) -> Mapping[str, int]:
    """Ranks that log the same names, a mean each, reduce them once.

    Args:
        ranks: how many, above eight: of fewer, each gets all rows.
        names: logged by each.

    Returns:
        "rank 0" and "another rank": the messages of that rank, and the most of any other; "bytes" of the rank that has
        most; "depth": messages of the longest chain.

    Raises:
        RuntimeError: the means are not those of the ranks.
    """
    played = CountedMessages(ranks)
    rows = Rows(["mean"] * names, max(64, names), True)
    with (
        mock.patch.multiple(dist, send=played.send, irecv=played.irecv, broadcast=played.broadcast),
        mock.patch.multiple(
            comm, world_size=lambda group: ranks, rank=lambda group: played.rank, carrier=lambda group, device: device
        ),
    ):
        for played.rank in reversed(range(ranks)):
            rank = played.rank
            row = rows.make(1, False, [(0.1 * (rank + name), 1.0, 1.0) for name in range(names)])
            comm.combined(row, rows.combine)
    assert played.result is not None
    found = torch.tensor([shown_value("mean", *total) for total in rows.totals(played.result)])
    expected = torch.tensor([0.1 * ((ranks - 1) / 2 + name) for name in range(names)])
    if rows.ranks_differ(played.result) or not torch.allclose(found, expected, rtol=1e-12):
        raise RuntimeError(f"{ranks} ranks: the means of what was logged are {found.tolist()}")
    others = [count for rank, count in played.messages.items() if rank]
    most = max(played.size.values())
    return {"rank 0": played.messages[0], "another rank": max(others), "bytes": most, "depth": played.depth}


# -- the agreement over hosts ----------------------------------------------------------------------------------


@dataclass
class _Message:
    """A message between hosts, as its sender or its receiver holds it."""

    chain: int = 0
    has_come: bool = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Nothing: who plays the ranks looks whether it has come."""
        return True


class _Leader:
    """The leader of one host, which is played as far as its messages have come."""

    def __init__(self, place: int, run: _Hosts, row: Tensor) -> None:
        self.place, self.chain, self.messages = place, 0, 0
        self.waiting: list[Any] = []
        self.result: Tensor | None = None
        self._run = run
        self._playing = exchanged(place, run.count, row, self._send, self._receive)

    def _send(self, tensor: Tensor, to: int) -> _Message:
        self.messages += 1
        self._run.deliver(self.place, to, tensor.clone(), self.chain + 1)
        return _Message(has_come=True)

    def _receive(self, tensor: Tensor, source: int) -> _Message:
        self.messages += 1
        return self._run.expect(source, self.place, tensor)

    def go_on(self) -> None:
        """As far as it can."""
        while self.result is None and all(message.has_come for message in self.waiting):
            self.chain = max([self.chain, *(message.chain for message in self.waiting)])
            try:
                self.waiting = next(self._playing)
            except StopIteration as over:
                self.result = over.value


class _Hosts:
    """What leaders of hosts have sent one another."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._sent: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._expected: dict[tuple[int, int], tuple[Tensor, _Message]] = {}

    def deliver(self, source: int, to: int, tensor: Tensor, chain: int) -> None:
        """A message, to whoever expects it or will."""
        if (source, to) in self._expected:
            room, message = self._expected.pop((source, to))
            room.copy_(tensor)
            message.chain, message.has_come = chain, True
        else:
            self._sent[source, to] = tensor, chain

    def expect(self, source: int, to: int, room: Tensor) -> _Message:
        """The message from there, now or later."""
        message = _Message()
        if (source, to) in self._sent:
            tensor, message.chain = self._sent.pop((source, to))
            room.copy_(tensor)
            message.has_come = True
        else:
            self._expected[source, to] = room, message
        return message


def agree(hosts: int) -> Mapping[str, int]:
    """Hosts agree once on what any of their ranks wants.

    Args:
        hosts: how many.

    Returns:
        "most": messages of the host that has most; "depth": messages of the longest chain.

    Raises:
        RuntimeError: they have not agreed on the largest.
    """
    run = _Hosts(hosts)
    leaders = [_Leader(place, run, torch.tensor([place, -place])) for place in range(hosts)]
    for _ in range(2 * hosts.bit_length()):
        for leader in leaders:
            leader.go_on()
    found = {tuple(leader.result.tolist()) if leader.result is not None else () for leader in leaders}
    if found != {(hosts - 1, 0)}:
        raise RuntimeError(f"{hosts} hosts have not agreed: {found}")
    return {
        "most": max(leader.messages for leader in leaders),
        "depth": max(leader.chain for leader in leaders),
    }
