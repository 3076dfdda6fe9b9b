"""What a run has left: events and tensors of its ranks, as they are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.verify.processes import Ending

Event = dict[str, Any]


@dataclass(frozen=True)
class RankRecording:
    """What one rank has left.

    Attributes:
        folder: where.
        ending: how it ended.
    """

    folder: Path
    ending: Ending

    @cached_property
    def events(self) -> list[Event]:
        """All that it noted, in order."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def of(self, *kinds: str) -> list[Event]:
        """The events of some kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    @cached_property
    def steps(self) -> list[Event]:
        """Its optimizer steps that were finished."""
        return [event for event in self.of("step") if (self.folder / f"parameters-{event['update']}.pt").exists()]

    def load(self, what: str, update: int) -> dict[str, Any]:
        """Tensors of an update, by parameter; empty where there are none."""
        path = self.folder / f"{what}-{update}.pt"
        return dict(torch.load(path, mmap=True)) if path.exists() else {}

    @cached_property
    def printed(self) -> list[str]:
        """The lines that it printed."""
        path = self.folder / "stdout"
        return path.read_text(errors="replace").splitlines() if path.exists() else []


@dataclass(frozen=True)
class Recording:
    """What a run has left, rank by rank."""

    ranks: tuple[RankRecording, ...]

    @property
    def first(self) -> RankRecording:
        """Rank 0's."""
        return self.ranks[0]

    def of(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        """The events of some kinds of all ranks, each with its rank."""
        for number, rank in enumerate(self.ranks):
            for event in rank.of(*kinds):
                yield number, event

    def has(self, kind: str) -> bool:
        """Whether any rank noted such an event."""
        return any(True for _ in self.of(kind))

    def whole(self, what: str, update: int) -> list[dict[str, Tensor | None]]:
        """Tensors of an update by rank, those that are sharded put together from all ranks."""
        found = [rank.load(what, update) for rank in self.ranks]
        return [{key: self._whole(found, own, key) for key in own} for own in found]

    def _whole(self, ranks: Sequence[dict[str, Any]], own: dict[str, Any], key: str) -> Tensor | None:
        value = own[key]
        if not isinstance(value, dict):
            return None if value is None else value
        parts = [rank[key] for rank in ranks if isinstance(rank.get(key), dict)]
        whole = torch.zeros(value["shape"], dtype=value["part"].dtype)
        for part in parts:
            place = tuple(slice(at, at + size) for at, size in zip(part["offset"], part["own"], strict=True))
            if part["part"].numel():
                whole[place] = part["part"]
        return whole

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return any(isinstance(value, dict) for value in self.first.load("gradients", 0).values())
