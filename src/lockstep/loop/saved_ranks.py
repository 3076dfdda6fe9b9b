"""What each rank had to itself when a checkpoint was taken, and what of it each rank gets that goes on.

Where a run goes on with the same ranks in the same replicas, each gets what it had. Else it depends on whose a quantity
is:

- Logged values, torchmetrics objects and the window's beginning are each replica's. The replicas that go on share out
  those of the saved ones among them.
- States of loaders, of random generators, and of buffers within a window are each replica's, too. They are taken over
  where there are as many replicas.
- Gradients of the window and the weights of its losses are the run's. Each replica gets the mean of the gradients, and
  its part of the weights.

Gradients can be taken over where there are as many replicas, and in manual optimization. Else the window is played
again from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.source import of_all_ranks
from lockstep.engines.collectives import ReplicaMap
from lockstep.engines.sharded.fully_shard import whole_gradients
from lockstep.loop.parts import merged

Part = dict[str, Any]
"""What a checkpoint holds of one rank."""


@dataclass(frozen=True)
class SavedRanks:
    """The ranks of the attempt that saved, by the samples that they saw."""

    parts: Sequence[Part]
    of_rank: tuple[int, ...]
    """The replica of each rank."""

    @classmethod
    def read(cls, own: dict[str, Any]) -> SavedRanks:
        """From lockstep's part of a checkpoint.

        Raises:
            ValueError: replicas that cannot be.
        """
        parts, of_rank = own["ranks"], own["replicas"]
        if len(of_rank) != len(parts) or set(of_rank) != set(range(max(of_rank, default=-1) + 1)):
            raise ValueError(f"replicas is {of_rank!r:.50}, of {len(parts)} ranks")
        return cls(parts, tuple(of_rank))

    @property
    def count(self) -> int:
        """Number of replicas."""
        return max(self.of_rank) + 1

    def members(self, replica: int) -> list[int]:
        """The ranks of a replica."""
        return [rank for rank, its in enumerate(self.of_rank) if its == replica]

    @property
    def of_replicas(self) -> list[Part]:
        """The parts of each replica's first rank, which stand for all of the replica's."""
        return [self.parts[self.of_rank.index(replica)] for replica in range(self.count)]

    @property
    def knows_logged(self) -> bool:
        """Whether what the epoch had logged is there: a rank that saved alone did not know that of the others."""
        return all("results" in part for part in self.of_replicas if part)  # a part that nobody has read is empty

    def _window_start(self, mine: Sequence[Part]) -> Part:
        """The beginning of the window under way, for a rank that stands for several; buffers are rank 0's."""
        first = self.parts[0].get("window_start") or {}
        alike = {key: first.get(key, {}) for key in ("buffers", "published")}
        return {**joined(_saved(mine, "window_start")), **alike}

    def part_for(self, rank: int, replicas: ReplicaMap, cuts: bool, first_logs: bool) -> Part:
        """What a rank goes on with.

        Args:
            rank: of this attempt.
            replicas: of this attempt.
            cuts: whether its engine holds gradients in shards.
            first_logs: whether of each replica the first rank alone weighs losses.
        """
        alike = not self.holds_gradients or cuts == any("sharded" in part for part in self.parts)
        if self.of_rank == replicas.of_rank and alike:
            return self.parts[rank]
        each = self.of_replicas
        mine = each[replicas.index :: replicas.count]
        part: Part = joined(mine)
        if _saved(each, "window_start"):
            part["window_start"] = self._window_start(mine)
        part["data"] = of_all_ranks(self.parts[0].get("data"))
        if self.count == replicas.count:
            part.update(_those(mine[0], "data", "random", "buffers"))
        if self.holds_gradients:
            part["of others"] = self
            weighs = not first_logs or rank in replicas.first_ranks
            weights = _saved(mine, "weights")
            part["weights"] = sum(weights) if weights and weighs else None
        return part

    @property
    def holds_gradients(self) -> bool:
        """Whether a window was under way, or steps were by hand."""
        return any("gradients" in part for part in self.parts)

    def mean_gradients(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Whole gradients, the mean over the replicas; a replica without one counts as zeros.

        Args:
            shapes: of the whole parameters.
        """
        found: dict[str, Tensor] = {}
        for replica in range(self.count):
            for name, gradient in whole_gradients(self.parts, self.members(replica), shapes).items():
                found[name] = found[name] + gradient if name in found else gradient
        return {name: gradient / self.count for name, gradient in found.items()} if self.count > 1 else found


def joined(parts: Sequence[Part]) -> Part:
    """What several replicas had logged, as one goes on with it."""
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for name, state in part.get("metrics", {}).items():
            metrics.setdefault(name, []).extend(state if isinstance(state, list) else [state])
    return {"results": merged([part.get("results", []) for part in parts]), "metrics": metrics}


def _saved(parts: Sequence[Part], key: str) -> list[Any]:
    """What parts hold under a key, those left out that hold nothing."""
    return [part[key] for part in parts if part.get(key) is not None]


def at_window_start(part: Part, anew: bool) -> Part:
    """What a rank goes on with that plays the window under way again.

    Args:
        part: of the rank.
        anew: it is the epoch's first, and the epoch begins anew, with all that its hooks log.
    """
    start = part.get("window_start") or {}
    found = {**_those(part, "data", "random"), **_those(start, "metrics", "published")}
    found["buffers_at_start"] = start.get("buffers", {})
    return found if anew else {**found, **_those(start, "results")}


def _those(part: Part, *keys: str) -> Part:
    """What a part holds under some keys, as far as it does."""
    return {key: part[key] for key in keys if key in part}
