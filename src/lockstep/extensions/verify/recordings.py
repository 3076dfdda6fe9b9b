"""Access to the events and tensors that the ranks of a verified run have written to files."""

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
    """A rank's shard of a tensor. The tensor has the size `shape`, and the shard starts at `offset` with size `own`."""

    part: Tensor
    offset: tuple[int, ...]
    own: tuple[int, ...]
    shape: tuple[int, ...]


Value = Tensor | TensorPart | None
"""A parameter, gradient or buffer, as written to a file. None is a missing gradient."""


def place_of(part: TensorPart) -> tuple[slice, ...]:
    """Return the slices of the full tensor that a shard covers."""
    return tuple(slice(at, at + size) for at, size in zip(part["offset"], part["own"], strict=True))


@dataclass(frozen=True)
class RankRecording:
    """Access to the events, tensors and output that one rank has written to files.

    Attributes:
        folder: folder of the rank.
        ending: how the rank ended.
        numbers: for each of the rank's updates the number among the updates of all ranks; empty: the same numbers.
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
        """Return the rank's events of the given kinds whose values equal the values in ``wanted``.

        Example::

            rank.find("batch", loader=0, iteration=1)
        """
        found = [event for event in self.events if event["kind"] in kinds]
        for name, value in wanted.items():
            found = [event for event in found if event[name] == value]
        return found

    def line_of(self, kind: str, **wanted: object) -> str:
        """Return the source line recorded with the first event that `find` returns, or "" if there is no event."""
        found = self.find(kind, **wanted)
        return str(found[0]["where"]) if found else ""

    @cached_property
    def steps(self) -> list[Event]:
        """Events of the rank's finished optimizer steps."""
        # parameters are written after a step
        return [event for event in self.find("step") if self._path("parameters", event["update"]).exists()]

    def places(self) -> list[tuple[int, int]]:
        """Return a list with (epoch, index of the update within the epoch) for each of the rank's updates."""
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
        """Load an update's tensors of kind ``what`` (such as "gradients"), by parameter; {} if none were written."""
        return dict(self._load(what, update))

    def sums(self, update: int) -> dict[str, dict[int, Tensor]]:
        """Load each backward's contribution to this rank's gradients, as `strided_sums` by parameter and backward."""
        return dict(self._load("sums", update))

    def has_made(self, update: int) -> bool:
        """Return True if this rank made the update. Inside Join, a rank that has run out of data makes no updates."""
        return self._path("sums", update).exists()

    def unclipped_gradients(self, update: int) -> dict[str, Value]:
        """Load an update's gradients as they were before clipping."""
        return self.load("unclipped", update) or self.load("gradients", update)

    @cached_property
    def printed(self) -> list[str]:
        """Lines of the rank's standard output."""
        return self._lines("stdout")

    @cached_property
    def errors(self) -> list[str]:
        """Lines of the rank's standard error, without trailing blank lines."""
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
    """Access to the recordings of all ranks of a run."""

    ranks: tuple[RankRecording, ...]

    @property
    def first(self) -> RankRecording:
        """Recording of rank 0."""
        return self.ranks[0]

    def find(self, *kinds: str, **wanted: object) -> Iterator[tuple[int, Event]]:
        """Yield (rank, event) for the events of the given kinds whose values equal ``wanted``."""
        for number, rank in enumerate(self.ranks):
            for event in rank.find(*kinds, **wanted):
                yield number, event

    def has(self, kind: str) -> bool:
        """Return True if any rank recorded an event of a kind."""
        return next(self.find(kind), None) is not None

    @cached_property
    def steps(self) -> list[Event]:
        """Optimizer steps of all ranks, each as recorded by the first rank that made the step."""
        found: dict[int, Event] = {}
        for rank in self.ranks:
            for event in rank.steps:
                found.setdefault(event["update"], event)
        return [found[update] for update in sorted(found)]

    @property
    def uneven_from(self) -> int | None:
        """Index of the first update that some ranks did not make, or None if all ranks made all updates."""
        made = [{event["update"] for event in rank.steps} for rank in self.ranks]
        return min(set().union(*made) - set(made[0]).intersection(*made), default=None)

    def joined(self) -> Recording:
        """Return a copy of the recording in which each rank's updates are numbered as in one process.

        Inside Join a rank without data makes no update, but the others do, so that the ranks' own numbers differ.
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
        """Number of optimizer steps on the rank that made the fewest."""
        return min(len(rank.steps) for rank in self.ranks)

    def assembled(self, what: str, update: int) -> list[dict[str, Tensor | None]]:
        """Load each rank's tensors of kind ``what`` of an update, with the ranks' shards assembled to full tensors."""
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
        """True if any parameter is a DTensor."""
        return any(isinstance(value, dict) for value in self.first.load("gradients", 0).values())
