"""Ranks that put together what they have logged, played one after another in one process; their messages are counted.

The way of the messages and what is computed on it are lockstep's own. Each rank runs to its last message before those
run that get it: what is sent waits in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.loop.logged_rows import Rows


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
    found = torch.tensor(rows.values(played.result))
    expected = torch.tensor([0.1 * ((ranks - 1) / 2 + name) for name in range(names)])
    if rows.ranks_differ(played.result) or not torch.allclose(found, expected, rtol=1e-12):
        raise RuntimeError(f"{ranks} ranks: the means of what was logged are {found.tolist()}")
    others = [count for rank, count in played.messages.items() if rank]
    most = max(played.size.values())
    return {"rank 0": played.messages[0], "another rank": max(others), "bytes": most, "depth": played.depth}
