"""What a run has left: events and tensors of its ranks, as they are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.extensions.verify.processes import Ending

Event = dict[str, Any]
"""What a process noted, by name; of which types depends on the kind."""


class TensorPart(TypedDict):
    """A rank's part of a tensor, and where that lies in the whole: `offset` and `own`, its shape."""

    part: Tensor
    offset: tuple[int, ...]
    own: tuple[int, ...]
    shape: tuple[int, ...]


Value = Tensor | TensorPart | None
"""A tensor of a parameter, as it is written down; None for a gradient that is not there."""


def place_of(part: TensorPart) -> tuple[slice, ...]:
    """The place of a part in the whole."""
    return tuple(slice(at, at + size) for at, size in zip(part["offset"], part["own"], strict=True))


@dataclass(frozen=True)
class RankRecording:
    """What one rank has left.

    Attributes:
        folder: where.
        ending: how it ended.
        numbers: by its own updates, those that they have among the updates of all ranks; empty: they are the same.
    """

    folder: Path
    ending: Ending
    numbers: tuple[int, ...] = ()

    @cached_property
    def events(self) -> list[Event]:
        """All that it noted, in order."""
        found: list[Event] = [json.loads(line) for line in self._lines("events.jsonl") if line.endswith("}")]
        for event in found if self.numbers else ():
            if "update" in event:
                event["update"] = self._number(event["update"])
        return found

    def of(self, *kinds: str, **wanted: object) -> list[Event]:
        """The events of some kinds, or those of them that have these values."""
        found = [event for event in self.events if event["kind"] in kinds]
        for name, value in wanted.items():
            found = [event for event in found if event[name] == value]
        return found

    def where(self, kind: str, **wanted: object) -> str:
        """The line of the first such event; "" for none."""
        found = self.of(kind, **wanted)
        return str(found[0]["where"]) if found else ""

    @cached_property
    def steps(self) -> list[Event]:
        """Its optimizer steps that were finished."""
        return [event for event in self.of("step") if self._path("parameters", event["update"]).exists()]

    def places(self) -> list[tuple[int, int]]:
        """Return, by its own updates, the epoch in which it made each, and how many it had made in that before."""
        found: list[tuple[int, int]] = []
        epoch, made = 0, 0
        for event in self.of("batch", "step"):
            if event["kind"] == "step":
                found.append((epoch, made))
                made += 1
            elif event["grad"] and event["iteration"] != epoch:
                epoch, made = event["iteration"], 0
        return found

    def load(self, what: str, update: int) -> dict[str, Value]:
        """Tensors of an update, by parameter; empty where there are none."""
        path = self._path(what, update)
        return dict(torch.load(path, mmap=True)) if path.exists() else {}

    def sums(self, update: int) -> dict[str, dict[int, Tensor]]:
        """By parameter and backward, what that gave on this rank, as sums over stretches of elements."""
        path = self._path("sums", update)
        return dict(torch.load(path, mmap=True)) if path.exists() else {}

    def has_made(self, update: int) -> bool:
        """Return False for an update that this rank left to the others, as one without data does within Join."""
        return self._path("sums", update).exists()

    def of_step(self, update: int) -> dict[str, Value]:
        """The gradients of an update, before they are clipped."""
        return self.load("unclipped", update) or self.load("gradients", update)

    @cached_property
    def printed(self) -> list[str]:
        """The lines that it printed."""
        return self._lines("stdout")

    @cached_property
    def complaints(self) -> list[str]:
        """The lines that it printed as errors, down to the last that says something."""
        return self._lines("stderr")

    def _number(self, update: int) -> int:
        """Return the number that an own update has among those of all ranks; of one that was not made, the next."""
        made = len(self.numbers)
        return self.numbers[update] if update < made else self.numbers[-1] + 1 + update - made

    def _path(self, what: str, update: int) -> Path:
        if self.numbers and what != "first":  # first parameters are counted by optimizer
            update = self.numbers.index(update) if update in self.numbers else -1
        return self.folder / f"{what}-{update}.pt"

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text(errors="replace").strip().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Recording:
    """What a run has left, rank by rank."""

    ranks: tuple[RankRecording, ...]

    @property
    def first(self) -> RankRecording:
        """Rank 0's."""
        return self.ranks[0]

    def of(self, *kinds: str, **wanted: object) -> Iterator[tuple[int, Event]]:
        """The events of some kinds of all ranks, each with its rank."""
        for number, rank in enumerate(self.ranks):
            for event in rank.of(*kinds, **wanted):
                yield number, event

    def has(self, kind: str) -> bool:
        """Whether any rank noted such an event."""
        return next(self.of(kind), None) is not None

    @cached_property
    def steps(self) -> list[Event]:
        """The optimizer steps of all ranks, each as the first rank noted it that made it."""
        found: dict[int, Event] = {}
        for rank in self.ranks:
            for event in rank.steps:
                found.setdefault(event["update"], event)
        return [found[update] for update in sorted(found)]

    @property
    def uneven_from(self) -> int | None:
        """The first update that some ranks do not make; None if there is none."""
        made = [{event["update"] for event in rank.steps} for rank in self.ranks]
        return min(set().union(*made) - set(made[0]).intersection(*made), default=None)

    def joined(self) -> Recording:
        """Number updates as one process makes them: within Join a rank without data makes none, and the others do."""
        made = [rank.places() for rank in self.ranks]
        everywhere = {place: number for number, place in enumerate(sorted(set().union(*made)))}
        ranks = [
            replace(rank, numbers=tuple(map(everywhere.__getitem__, own)))
            for rank, own in zip(self.ranks, made, strict=True)
        ]
        return Recording(tuple(ranks))

    @property
    def fewest_steps(self) -> int:
        """The optimizer steps of the rank that made fewest."""
        return min(len(rank.steps) for rank in self.ranks)

    def whole(self, what: str, update: int) -> list[dict[str, Tensor | None]]:
        """Tensors of an update by rank, those that are sharded put together from all ranks."""
        found = [rank.load(what, update) for rank in self.ranks]
        return [{key: self._whole(found, own, key) for key in own} for own in found]

    def _whole(self, ranks: Sequence[dict[str, Value]], own: dict[str, Value], key: str) -> Tensor | None:
        value = own[key]
        if value is None or isinstance(value, Tensor):
            return value
        whole = torch.zeros(value["shape"], dtype=value["part"].dtype)
        for rank in ranks:
            part = rank.get(key)
            if isinstance(part, dict) and part["part"].numel():
                whole[place_of(part)] = part["part"]
        return whole

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some parameter is a DTensor."""
        return any(isinstance(value, dict) for value in self.first.load("gradients", 0).values())
