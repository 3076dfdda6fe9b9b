"""Compares each rank with one process that is fed this rank's samples alone: does its code depend on the rank?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.verify import refusals
from lockstep.verify.calls import WORD, first_other_line
from lockstep.verify.causes import Cause, gradient_factor
from lockstep.verify.compare import own_gradients
from lockstep.verify.diagnose import Parts
from lockstep.verify.recordings import Recording
from lockstep.verify.steps import FOLLOW, strided_sums

_ALIKE = 1e-6
"""The largest difference that passes, as part of the largest gradient."""

IN_BATCH = (
    "the loss compares the samples of a batch with each other (in-batch negatives, statistics over a batch), so that "
    "it is another one on a larger batch; each rank's gradient is what one process computes of its part, in all steps"
)


class Runs(Protocol):
    """Makes runs."""

    def on_ranks(self, *overrides: str) -> Recording:
        """Run the script on all ranks."""

    def on_one(self, ranks: Recording, *overrides: str, order: tuple[int, ...] = ()) -> Recording:
        """Run the script as one process."""


@dataclass(frozen=True)
class Verdict:
    """What runs with the samples of one rank have shown.

    Attributes:
        nature: why ranks and one process differ by nature; "" where they do not.
        cause: why they differ otherwise; None where it was not found.
    """

    nature: str = ""
    cause: Cause | None = None


class RanksAlone:
    """Compares ranks with one process, rank by rank.

    Args:
        ranks: the run on ranks.
        runs: makes more of them.
    """

    def __init__(self, ranks: Recording, runs: Runs) -> None:
        self.ranks = ranks
        self.runs = runs
        self.updates = min(len(rank.steps) for rank in ranks.ranks)

    def look(self) -> Verdict:
        """Feed one process the samples of each rank; where it computes the same, those of rank 0 twice."""
        if not self._averages():
            return Verdict()
        for rank in reversed(range(len(self.ranks.ranks))):
            alone = self.runs.on_one(self.ranks, FOLLOW, order=(rank,))
            if refusals.of_one(alone, self.ranks):
                return Verdict()
            for update in range(min(self.updates, len(alone.first.steps))):
                if not self._is_same(rank, update, alone):
                    return Verdict(cause=self._of_rank(rank, update, alone))
        return Verdict(cause=self._of_counts()) if self._is_same_twice() else Verdict(nature=IN_BATCH)

    def _averages(self) -> bool:
        """Whether every step of the ranks averages their own gradients."""
        for update in range(self.updates):
            parts = Parts(self.ranks, update)
            if not parts.are_known or parts.not_averaged(own_gradients(self.ranks, update)):
                return False
        return True

    # -- one rank

    def _pairs(self, rank: int, update: int, alone: Recording) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's gradient on a rank, and that of one process, as sums."""
        gradient = alone.first.load("unclipped", update) or alone.first.load("gradients", update)
        sums = [each.load("sums", update) for each in self.ranks.ranks]
        for key, value in gradient.items():
            if value is None or not any(own.get(key) for own in sums):
                continue
            expected = strided_sums(value)
            yield sum(sums[rank].get(key, {}).values(), torch.zeros_like(expected)), expected

    def _is_same(self, rank: int, update: int, alone: Recording) -> bool:
        """Whether one process computes a rank's own gradient."""
        pairs = list(self._pairs(rank, update, alone))
        scale = max((expected.abs().max().item() for _, expected in pairs), default=0.0)
        return all((own - expected).abs().max().item() <= _ALIKE * scale for own, expected in pairs)

    def _of_rank(self, rank: int, update: int, alone: Recording) -> Cause:
        factor = gradient_factor(list(self._pairs(rank, update, alone)))
        text = f"rank {rank} computes another gradient of its samples than one process does of the same: "
        text += "code or random numbers depend on the rank"
        if factor is not None and abs(factor - 1) > _ALIKE:
            times = f"{factor:.4g} times" if factor else "zero times"
            text = f"the loss of rank {rank} is {times} what one process computes of the same samples: code "
            text += "depends on the rank"
        proof = f"one process was fed the samples of rank {rank} alone"
        return Cause(text, self._line(rank, update), proof + (f", up to step {update}" if update else ""))

    def _line(self, rank: int, update: int) -> str:
        """The first line at which a rank computes something else than one process; "" for none."""
        override = f"{WORD} {update}"
        traced = self.runs.on_ranks(override)
        alone = self.runs.on_one(self.ranks, FOLLOW, override, order=(rank,))
        return first_other_line(traced.ranks[rank].of("call"), alone.first.of("call"))

    # -- a batch

    def _is_same_twice(self) -> bool:
        """Whether the samples of rank 0, each of them twice, have the same gradient: a mean has, negatives have not."""
        twice = self.runs.on_one(self.ranks, FOLLOW, order=(0, 0))
        return not refusals.of_one(twice, self.ranks) and self._is_same(0, 0, twice)

    def _of_counts(self) -> Cause:
        backward = self.ranks.first.of("backward")
        text = (
            "a mean of means: each rank divides parts of its loss by its own counts (of tokens, boxes, masked "
            "samples), and the counts differ"
        )
        proof = "each rank computes what one process does of its samples, and of each of them twice: only counts differ"
        return Cause(text, backward[0]["where"] if backward else "", proof)
