"""Recordings: the events and tensors that the ranks of a run have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.extensions.verify.processes import Ending

Event = dict[str, Any]
"""An event of the journal: its kind, and values by name. Each kind has its own names."""


class TensorPart(TypedDict):
    """A rank's shard of a tensor of size `shape`: it starts at `offset` and has the size `own`."""

    part: Tensor
    offset: tuple[int, ...]
    own: tuple[int, ...]
    shape: tuple[int, ...]


Value = Tensor | TensorPart | None
"""A parameter, its gradient or a buffer, as it is written. None: the gradient is missing."""


def place_of(part: TensorPart) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that a shard covers."""
    return tuple(slice(at, at + size) for at, size in zip(part["offset"], part["own"], strict=True))


@dataclass(frozen=True)
class RankRecording:
    """The recording of one rank.

    Attributes:
        folder: folder of the rank.
        ending: how it ended.
        numbers: for each of its own updates the number among the updates of all ranks; empty: the same numbers.
    """

    folder: Path
    ending: Ending
    numbers: tuple[int, ...] = ()

    @cached_property
    def events(self) -> list[Event]:
        """All events of the rank, in order."""
        # a rank that was killed may leave half a line
        found: list[Event] = [json.loads(line) for line in self._lines("events.jsonl") if line.endswith("}")]
        made = len(self.numbers)
        for event in found if self.numbers else ():
            if "update" in event:
                own = event["update"]
                # the last step may have been started only: it gets the next number
                event["update"] = self.numbers[own] if own < made else self.numbers[-1] + 1 + own - made
        return found

    def find(self, *kinds: str, **wanted: object) -> list[Event]:
        """Return the events of some kinds that have the wanted values.

        Example::

            rank.find("batch", loader=0, iteration=1)
        """
        found = [event for event in self.events if event["kind"] in kinds]
        for name, value in wanted.items():
            found = [event for event in found if event[name] == value]
        return found

    def line_of(self, kind: str, **wanted: object) -> str:
        """Return the line of the first event of a kind that has the wanted values; "" for none."""
        found = self.find(kind, **wanted)
        return str(found[0]["where"]) if found else ""

    @cached_property
    def steps(self) -> list[Event]:
        """Its finished optimizer steps."""
        # parameters are written after a step
        return [event for event in self.find("step") if self._path("parameters", event["update"]).exists()]

    def places(self) -> list[tuple[int, int]]:
        """Return for each of its own updates the epoch, and the number of earlier updates in that epoch."""
        found: list[tuple[int, int]] = []
        epoch, made = 0, 0
        for event in self.find("batch", "step"):
            if event["kind"] == "step":
                found.append((epoch, made))
                made += 1
            elif event["grad"] and event["iteration"] != epoch:
                epoch, made = event["iteration"], 0
        return found

    def load(self, what: str, update: int) -> dict[str, Value]:
        """Load tensors of an update by parameter; an empty dict if none were written."""
        return dict(self._load(what, update))

    def sums(self, update: int) -> dict[str, dict[int, Tensor]]:
        """Load, by parameter and backward, the gradient that this backward added on this rank, as strided sums."""
        return dict(self._load("sums", update))

    def has_made(self, update: int) -> bool:
        """Return False for an update that only other ranks made, as within Join after this rank's data ended."""
        return self._path("sums", update).exists()

    def unclipped_gradients(self, update: int) -> dict[str, Value]:
        """Load the gradients of an update as they were before clipping."""
        return self.load("unclipped", update) or self.load("gradients", update)

    @cached_property
    def printed(self) -> list[str]:
        """Lines of its standard output."""
        return self._lines("stdout")

    @cached_property
    def errors(self) -> list[str]:
        """Lines of its standard error, trailing blank ones removed."""
        return self._lines("stderr")

    def _path(self, what: str, update: int) -> Path:
        if self.numbers and what != "first":  # first parameters are numbered by optimizer
            update = self.numbers.index(update) if update in self.numbers else -1
        return self.folder / f"{what}-{update}.pt"

    def _load(self, what: str, update: int) -> Any:
        path = self._path(what, update)
        # mapped, not read: most comparisons need few of a large model's tensors at a time
        return torch.load(path, mmap=True) if path.exists() else {}

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text(errors="replace").strip().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Recording:
    """The recording of a run, rank by rank."""

    ranks: tuple[RankRecording, ...]

    @property
    def first(self) -> RankRecording:
        """The recording of rank 0."""
        return self.ranks[0]

    def find(self, *kinds: str, **wanted: object) -> Iterator[tuple[int, Event]]:
        """Yield (rank, event) for the events of some kinds that have the wanted values."""
        for number, rank in enumerate(self.ranks):
            for event in rank.find(*kinds, **wanted):
                yield number, event

    def has(self, kind: str) -> bool:
        """Return True if any rank noted an event of a kind."""
        return next(self.find(kind), None) is not None

    @cached_property
    def steps(self) -> list[Event]:
        """The optimizer steps of all ranks, each as noted by the first rank that made it."""
        found: dict[int, Event] = {}
        for rank in self.ranks:
            for event in rank.steps:
                found.setdefault(event["update"], event)
        return [found[update] for update in sorted(found)]

    @property
    def uneven_from(self) -> int | None:
        """The first update that some ranks do not make; None if all ranks make all."""
        made = [{event["update"] for event in rank.steps} for rank in self.ranks]
        return min(set().union(*made) - set(made[0]).intersection(*made), default=None)

    def joined(self) -> Recording:
        """Return the recording with updates numbered as one process makes them.

        Within Join a rank without data makes no update, but the others do, so that the ranks' own numbers differ.
        """
        made = [rank.places() for rank in self.ranks]
        everywhere = {place: number for number, place in enumerate(sorted(set().union(*made)))}
        ranks = [
            replace(rank, numbers=tuple(map(everywhere.__getitem__, own)))
            for rank, own in zip(self.ranks, made, strict=True)
        ]
        return Recording(tuple(ranks))

    @property
    def fewest_steps(self) -> int:
        """The optimizer steps of the rank that made the fewest."""
        return min(len(rank.steps) for rank in self.ranks)

    def assembled(self, what: str, update: int) -> list[dict[str, Tensor | None]]:
        """Load tensors of an update by rank. Sharded ones are put together from the shards of all ranks."""
        found = [rank.load(what, update) for rank in self.ranks]
        assembled: list[dict[str, Tensor | None]] = []
        for own in found:
            tensors: dict[str, Tensor | None] = {}
            for key, value in own.items():
                if value is None or isinstance(value, Tensor):
                    tensors[key] = value
                    continue
                whole = torch.zeros(value["shape"], dtype=value["part"].dtype)
                for values in found:
                    part = values.get(key)
                    if isinstance(part, dict) and part["part"].numel():
                        whole[place_of(part)] = part["part"]
                tensors[key] = whole
            assembled.append(tensors)
        return assembled

    @cached_property
    def is_sharded(self) -> bool:
        """True if a parameter is a DTensor."""
        return any(isinstance(value, dict) for value in self.first.load("gradients", 0).values())
