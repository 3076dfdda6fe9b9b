"""Mixed: several sources drawn from side by side, one batch of each for a micro-batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils._pytree import TreeSpec, tree_unflatten

from lockstep.data.combined import LENGTHS, rows
from lockstep.data.drawn_order import of_all_ranks
from lockstep.data.recut import Grouping
from lockstep.data.source import Source, Untouched, skipped
from lockstep.ground.seed import isolate_rng, random_states, set_random_states


class RowWeight(float):
    """The weight of a micro-batch of several loaders: that of its heaviest part.

    Attributes:
        parts: the weight of each part.
    """

    parts: tuple[float, ...]

    @classmethod
    def of(cls, parts: Iterable[float]) -> RowWeight:
        """The weight of these parts."""
        known = tuple(parts)
        made = cls(max(known))
        made.parts = known
        return made


class Mixed(Source):
    """Several sources in one of the modes of `CombinedLoader` but ``"sequential"``.

    A micro-batch weighs what the heaviest of its parts weighs. A part that a rank has no samples of is None there.

    Args:
        parts: the sources.
        spec: the nest that their batches come in.
        mode: ``"min_size"``, ``"max_size"`` or ``"max_size_cycle"``.
        limits: at most so many micro-batches of each part's pass.
    """

    def __init__(
        self, parts: list[Source], spec: TreeSpec, mode: str, limits: Sequence[int | float] | None = None
    ) -> None:
        self._parts = parts
        self._spec = self.nest = spec
        self._mode = mode
        self._limits = limits or [math.inf] * len(parts)
        self.rank = parts[0].rank
        self.pads = True  # its parts do, each by itself
        self._measure()
        self.fixed = all(part.fixed for part in parts)
        self.flexible = all(part.flexible for part in parts)
        # A sampler of the user's that begins anew is ahead of the loader, and its passes overlap.
        self.ahead = self.fixed or (mode != "max_size_cycle" and all(part.ahead for part in parts))
        self.batch = max(part.batch for part in parts)
        # Resume by reading again: the order of some depends on the process' random numbers, or where a later pass
        # begins shows on reading only.
        self._rereads = any(isinstance(part, Untouched) for part in parts) or (
            mode == "max_size_cycle" and any(map(math.isinf, self._lengths))
        )
        self._states: dict[str, Any] | None = None  # random states at the beginning of the pass
        self._own_states: list[Any] = []  # those of generators that loaders hold
        self._resume: dict[str, Any] | None = None

    def _measure(self) -> None:
        parts = self._parts
        self._lengths = [min(part.length, limit) for part, limit in zip(parts, self._limits, strict=True)]
        self.length = LENGTHS[self._mode](self._lengths)
        self.even = int(min(map(min, [part.even for part in parts], self._lengths)))

    def planned(self, ranks: int) -> int | float:
        lengths = [part.planned(ranks) for part in self._parts]
        return LENGTHS[self._mode](map(min, lengths, self._limits))

    def group(self, grouping: Grouping) -> None:
        for part in self._parts:  # which go on by the number of micro-batches
            part.group(replace(grouping, number=0, place=None))
        self._measure()

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        walk = self._rows([part.open for part in self._parts], epoch, start, stop)
        return (tree_unflatten(row, self._spec) for row in walk)

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        walk = self._rows([part.weighed for part in self._parts], epoch, start, stop)
        return map(self._weighed_row, walk)

    def _weighed_row(self, row: list[Any]) -> tuple[Any, float]:
        weight = RowWeight.of(0.0 if item is None else item[1] for item in row)
        self.mark = sum(part.mark for part in self._parts) % 2**52
        some = bool(weight)  # else it is a padding batch, or nobody's
        kept = [None if item is None or (some and not item[1]) else item[0] for item in row]
        return tree_unflatten(kept, self._spec), weight

    def has(self, number: int) -> bool:
        if self._mode == "max_size_cycle":
            return number < self.length
        parts = zip(self._parts, self._lengths, strict=True)
        some = all if self._mode == "min_size" else any
        return some(number < length and part.has(number) for part, length in parts)

    def weights(self, number: int) -> Sequence[float]:
        return [max(weights) for weights in zip(*self.row(number), strict=True)]

    def row(self, number: int) -> list[Sequence[float]]:
        found: list[Sequence[float] | None] = []
        for part, length in zip(self._parts, self._lengths, strict=True):
            local = number % int(length) if self._mode == "max_size_cycle" else number
            found.append(part.weights(local) if local < length and part.has(local) else None)
        size = max(len(weights) for weights in found if weights is not None)
        return [[0.0] * size if weights is None else weights for weights in found]

    def without(self, batch: Any, parts: Sequence[float]) -> Any:
        leaves = self._spec.flatten_up_to(batch)
        return tree_unflatten([leaf if part else None for leaf, part in zip(leaves, parts, strict=True)], self._spec)

    def leaves(self) -> list[Source]:
        return [leaf for part in self._parts for leaf in part.leaves()]

    def state_dict(self) -> dict[str, Any]:
        states = [part.state_dict() for part in self._parts]
        if self._rereads or self._mode == "max_size_cycle":
            states = list(map(of_all_ranks, states))  # other states do not tell how often their loader has begun anew
        found: dict[str, Any] = {"parts": states} if any(states) else {}
        if self._rereads and self._states is not None:
            found |= {"random": self._states, "own": self._own_states}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state if "random" in state else None
        for part, of_part in zip(self._parts, state.get("parts", []), strict=False):
            part.load_state_dict(of_part)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _rows(
        self, open_part: Sequence[Callable[..., Iterator[Any]]], epoch: int, start: int, stop: int | float
    ) -> Iterator[list[Any]]:
        """The parts' batches side by side, from row ``start`` on."""
        cycles = self._mode == "max_size_cycle"
        begin = 0 if self._rereads else start
        places = [divmod(begin, int(length)) if cycles and begin else (0, begin) for length in self._lengths]

        def opener(number: int) -> Callable[[int], Iterator[Any]]:
            first_turn, first_start = places[number]
            limit = min(self._limits[number], stop)

            def open_pass(turn: int) -> Iterator[Any]:
                at = first_start if turn == first_turn else 0
                opened = open_part[number](epoch, turn, at, limit)
                return opened if math.isinf(limit) else itertools.islice(opened, max(0, int(limit) - at))

            return open_pass

        openers = [opener(number) for number in range(len(self._parts))]
        walk = rows(openers, self._mode, [turn for turn, _ in places])
        resume, self._resume = self._resume, None
        if not self._rereads:
            return walk
        if resume is None or start == 0:
            self._states = random_states(include_cuda=False)
            self._own_states = [part.generator_states() for part in self._parts]
            return skipped(walk, start)
        self._states, self._own_states = resume["random"], resume.get("own", [])
        for part, states in zip(self._parts, self._own_states, strict=False):
            part.set_generator_states(states)
        with isolate_rng(include_cuda=False):
            set_random_states(resume["random"])
            return skipped(walk, start)
