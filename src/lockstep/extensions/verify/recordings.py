"""Access to the events and tensors that the ranks of a verified run have written to files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.extensions.verify.processes import Ending

Event = dict[str, Any]
"""An event of the journal: its kind, and values by name. Each kind has its own names."""


SCALARS: tuple[list[int], list[int]] = ([], [1])
"""Shapes of single numbers."""


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
        most: number of steps after which the rest are left out; None: no limit.
    """

    folder: Path
    ending: Ending
    most: int | None = None

    @cached_property
    def events(self) -> list[Event]:
        """All events of the rank, in order."""
        # a rank that was killed may leave half a line
        return [json.loads(line) for line in self._lines("events.jsonl") if line.endswith("}")]

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
        paths = [self.folder / f"parameters-{event['update']}.pt" for event in self.find("step")]
        return [event for event, path in zip(self.find("step"), paths, strict=True) if path.exists()][: self.most]

    def epochs(self) -> list[int]:
        """Return a list with the epoch of each of the rank's updates."""
        found: list[int] = []
        epoch = 0
        for event in self.find("batch", "step"):
            if event["kind"] == "step":
                found.append(epoch)
            elif event["grad"]:
                epoch = event["iteration"]
        return found

    def load(self, what: str, update: int) -> dict[str, Value]:
        """Load an update's tensors of kind ``what`` (such as "gradients"), by parameter; {} if none were written."""
        return dict(self._load(what, update))

    def sums(self, update: int) -> dict[str, dict[int, Tensor]]:
        """Load each backward's contribution to this rank's gradients, as `strided_sums` by parameter and backward."""
        return dict(self._load("sums", update))

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

    def _load(self, what: str, update: int) -> Any:
        path = self.folder / f"{what}-{update}.pt"
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

    @property
    def steps(self) -> list[Event]:
        """Optimizer steps that all ranks made, as rank 0 has recorded them."""
        return self.first.steps[: self.fewest_steps]

    @property
    def uneven_from(self) -> int | None:
        """Index of the first update that ranks make in different epochs or not at all, or None.

        Inside Join a rank without data makes no update, but the others do.
        """
        places = zip_longest(*(rank.epochs() for rank in self.ranks))
        return next((at for at, epochs in enumerate(places) if len(set(epochs)) > 1), None)

    def until(self, update: int | None) -> Recording:
        """Return a copy of the recording without the given update and later ones."""
        return Recording(tuple(replace(rank, most=update) for rank in self.ranks))

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
    def reduced_in_step(self) -> list[Event]:
        """Calls of collectives by which an optimizer of the script reduces gradients in its step."""
        calls = self.first.find("collective", in_step=True)
        return [event for event in calls if "reduce" in event["name"] and event["shape"] not in SCALARS]

    @cached_property
    def reduced_after_step(self) -> list[Event]:
        """Calls by which the script reduces weights or gradients after a step and before the next backward."""
        sizes = [value.numel() for value in self.first.load("parameters", 0).values() if isinstance(value, Tensor)]
        calls = self.first.find("collective", name="all_reduce", backwards=0, in_step=False, in_module=False)
        # a single number is more likely a loss
        return [event for event in calls if event["update"] and math.prod(event["shape"]) in {*sizes, sum(sizes)} - {1}]

    @cached_property
    def has_loader(self) -> bool:
        """True if a loader is read with gradients enabled, so that it feeds the training."""
        return any(event["grad"] for _, event in self.find("batch"))

    @cached_property
    def is_sharded(self) -> bool:
        """True if any parameter is a DTensor."""
        return any(isinstance(value, dict) for value in self.first.load("gradients", 0).values())
