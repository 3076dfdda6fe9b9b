"""Comparison of each rank with one process that is fed this rank's samples only: does its code depend on the rank?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.calls import TRACE, first_other_line
from lockstep.extensions.verify.causes import gradient_factor
from lockstep.extensions.verify.compare import Reason, by_rank, own_gradients
from lockstep.extensions.verify.diagnose import Parts
from lockstep.extensions.verify.functions import KEPT
from lockstep.extensions.verify.loaders import DRAWS
from lockstep.extensions.verify.nudge import NUDGED, STILL, compares_samples
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.steps import FOLLOW, strided_sums

_TOLERANCE = 1e-6
"""The largest difference that passes, as a fraction of the largest gradient."""

IN_BATCH = (
    "the loss compares the samples of a batch with each other (in-batch negatives, statistics over a batch), and so "
    "differs for a larger batch; in all steps each rank's gradient is what one process computes for its part"
)
OWN_NUMBERS = (
    "in a step each rank draws its own random numbers of Python's, of NumPy's, or of torch's for a whole batch, which "
    "one process cannot reproduce for all ranks at once; in all steps each rank's gradient is what one process "
    "computes for its part, with the rank's numbers"
)
UNSEEN = (
    "in all steps each rank's gradient is what one process computes for its part, but one process computes another one "
    "for all parts together. Either the loss compares the samples of a batch, or it divides by each rank's own "
    "counts: a layer whose output has a row for each sample would show which, but there is none. Add one, such as "
    "nn.Linear"
)


@dataclass(frozen=True)
class AloneFinding:
    """Result of the runs with one rank's samples.

    Attributes:
        nature: why ranks and one process are expected to differ; "" if they are not.
        cause: why they differ otherwise; None if it was not found.
        unknown: why neither was found out, or "".
    """

    nature: str = ""
    cause: Reason | None = None
    unknown: str = ""


class RanksAlone:
    """Comparison of ranks with one process, rank by rank.

    Args:
        ranks: the run on ranks.
        single: the run of one process that was fed the samples of all.
        runs: makes more runs.
    """

    def __init__(self, ranks: Recording, single: Recording, runs: Runs) -> None:
        self.ranks = ranks
        self.single = single
        self.runs = runs
        self.updates = ranks.fewest_steps

    def check(self) -> AloneFinding:
        """Feed one process the samples of each rank. If it computes the same, check if the loss compares samples."""
        for update in range(self.updates):
            parts = Parts(self.ranks, update)
            # a gradient that is not the mean over ranks shows nothing about a rank's own
            if not parts.are_known or parts.not_averaged(own_gradients(self.ranks, update)):
                return AloneFinding()
        # a rank that leaves out a batch makes its step with samples of another place
        for step in range(self.updates):
            counts = [len(rank.find("batch", grad=True, step=step)) for rank in self.ranks.ranks]
            if len(set(counts)) > 1:
                skipped = Reason(
                    "ranks leave out different batches: the condition that skips a batch uses a rank's own values "
                    "(such as its loss) instead of those of all ranks",
                    self.ranks.first.line_of("iteration"),
                    f"batches drawn for step {step}: {by_rank(enumerate(counts))}",
                )
                return AloneFinding(cause=skipped)
        # rank 0 last: code that depends on the rank often leaves rank 0 as it is
        for rank in reversed(range(len(self.ranks.ranks))):
            alone = self.runs.on_one(self.ranks, FOLLOW, order=(rank,))
            if refusals.of_one(alone):
                return AloneFinding()
            for update in range(min(self.updates, len(alone.first.steps))):
                pairs = list(self._pairs(rank, update, alone))
                scale = max((expected.abs().max().item() for _, expected in pairs), default=0.0)
                if any(not (own - expected).abs().max().item() <= _TOLERANCE * scale for own, expected in pairs):
                    return AloneFinding(cause=self._of_rank(rank, update, gradient_factor(pairs)))
        still, nudged = (self.runs.on_one(self.ranks, FOLLOW, word, order=(0,)) for word in (STILL, NUDGED))
        compares = compares_samples(still.first.find("rows"), nudged.first.find("rows"))
        if compares:
            return AloneFinding(nature=IN_BATCH)
        if self._draws_own():
            return AloneFinding(nature=OWN_NUMBERS)
        if compares is None:
            return AloneFinding(unknown=UNSEEN)
        counts_differ = Reason(
            "a mean of means: each rank divides parts of its loss by its own counts (of tokens, boxes, masked "
            "samples), and the counts differ",
            self.ranks.first.line_of("backward"),
            "each rank's gradient is what one process computes for its samples, and no sample's loss depends on others",
        )
        return AloneFinding(cause=counts_differ)

    def _pairs(self, rank: int, update: int, alone: Recording) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter's gradient on a rank and in one process, as strided sums."""
        sums = [each.sums(update) for each in self.ranks.ranks]
        for key, value in alone.first.unclipped_gradients(update).items():
            if not isinstance(value, Tensor) or not any(own.get(key) for own in sums):
                continue
            expected = strided_sums(value)
            yield sum(sums[rank].get(key, {}).values(), torch.zeros_like(expected)), expected

    def _of_rank(self, rank: int, update: int, factor: float | None) -> Reason:
        """Explain why a rank computes another gradient, ``factor`` times that of one process if there is one factor."""
        text = (
            f"rank {rank} computes another gradient for its samples than one process does for the same ones: code or "
            "random numbers depend on the rank"
        )
        if factor is not None and abs(factor - 1) > _TOLERANCE:
            times = f"{factor:.4g}" if factor else "zero"
            text = (
                f"the loss of rank {rank} is {times} times that of one process for the same samples: code depends on "
                "the rank"
            )
        # both runs again, with a trace of the update
        override = f"{TRACE} {update}"
        traced = self.runs.on_ranks(override)
        alone = self.runs.on_one(self.ranks, FOLLOW, override, order=(rank,))
        line = first_other_line(traced.ranks[rank].find("call"), alone.first.find("call"))
        return Reason(text, line, f"one process was fed the samples of rank {rank} only, up to step {update}")

    def _draws_own(self) -> bool:
        """Return True if steps draw random numbers that differ between ranks and cannot be joined."""
        if any(event["grad"] for event in self.single.first.find(*KEPT)):
            return True
        paths = [sorted(rank.folder.glob("random-*.pkl")) for rank in self.ranks.ranks]
        states = {tuple(path.read_bytes() for path in own) for own in paths}
        return self.ranks.has(DRAWS) and len(states) > 1
