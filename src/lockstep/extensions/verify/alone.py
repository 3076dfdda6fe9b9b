"""Compares each rank with one process that is fed this rank's samples alone: does its code depend on the rank?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.calls import WORD, first_other_line
from lockstep.extensions.verify.causes import gradient_factor
from lockstep.extensions.verify.compare import Reason, own_gradients, told_by_rank
from lockstep.extensions.verify.diagnose import Parts
from lockstep.extensions.verify.loaders import DRAWS
from lockstep.extensions.verify.nature import KEPT
from lockstep.extensions.verify.nudge import NUDGED, STILL, compares_samples
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.steps import FOLLOW, strided_sums

_ALIKE = 1e-6
"""The largest difference that passes, as part of the largest gradient."""

IN_BATCH = (
    "the loss compares the samples of a batch with each other (in-batch negatives, statistics over a batch), so that "
    "it is another one on a larger batch; each rank's gradient is what one process computes of its part, in all steps"
)


OWN_NUMBERS = (
    "each rank draws its own random numbers of Python's, of NumPy's, or of torch's for a whole batch in a step, which "
    "one process cannot for all of them: each rank's gradient is what one process computes of its part, with its "
    "numbers, in all steps"
)
UNSEEN = (
    "each rank's gradient is what one process computes of its part, in all steps, and differs from that of the whole: "
    "whether the loss compares the samples of a batch, or divides by each rank's own counts, shows in what layers give "
    "for each sample, and no layer gives a tensor with a row for each: let one do so (nn.Linear, say)"
)


@dataclass(frozen=True)
class AloneFinding:
    """What runs with the samples of one rank have shown.

    Attributes:
        nature: why ranks and one process differ by nature; "" where they do not.
        cause: why they differ otherwise; None where it was not found.
        unknown: why it cannot be told whether they do; "" where it can.
    """

    nature: str = ""
    cause: Reason | None = None
    unknown: str = ""


class RanksAlone:
    """Compares ranks with one process, rank by rank.

    Args:
        ranks: the run on ranks.
        whole: the run of one process that was fed the samples of all.
        runs: makes more of them.
    """

    def __init__(self, ranks: Recording, whole: Recording, runs: Runs) -> None:
        self.ranks = ranks
        self.whole = whole
        self.runs = runs
        self.updates = ranks.fewest_steps

    def look(self) -> AloneFinding:
        """Feed one process the samples of each rank; where it computes the same, move one of rank 0's a little."""
        if not self._averages():
            return AloneFinding()
        skipped = self._of_skipped()
        if skipped is not None:
            return AloneFinding(cause=skipped)
        for rank in reversed(range(len(self.ranks.ranks))):
            alone = self.runs.on_one(self.ranks, FOLLOW, order=(rank,))
            if refusals.of_one(alone):
                return AloneFinding()
            for update in range(min(self.updates, len(alone.first.steps))):
                if not self._is_same(rank, update, alone):
                    return AloneFinding(cause=self._of_rank(rank, update, alone))
        compares = self._compares_samples()
        if compares:
            return AloneFinding(nature=IN_BATCH)
        if self._draws_own():
            return AloneFinding(nature=OWN_NUMBERS)
        return AloneFinding(unknown=UNSEEN) if compares is None else AloneFinding(cause=self._of_counts())

    def _averages(self) -> bool:
        """Whether every step of the ranks averages their own gradients."""
        for update in range(self.updates):
            parts = Parts(self.ranks, update)
            if not parts.are_known or parts.not_averaged(own_gradients(self.ranks, update)):
                return False
        return True

    def _of_skipped(self) -> Reason | None:
        """Ranks that leave out batches, each others, so that a step sees samples of several places."""
        for step in range(self.updates):
            counts = [len(rank.of("batch", grad=True, step=step)) for rank in self.ranks.ranks]
            if len(set(counts)) > 1:
                return Reason(
                    "ranks leave out other batches: a condition that skips one looks at a rank's own values (its loss, "
                    "say), and not at all ranks'",
                    self.ranks.first.where("iteration"),
                    f"batches drawn for step {step}: {told_by_rank(enumerate(counts))}",
                )
        return None

    # -- one rank

    def _pairs(self, rank: int, update: int, alone: Recording) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's gradient on a rank, and that of one process, as sums."""
        sums = [each.sums(update) for each in self.ranks.ranks]
        for key, value in alone.first.of_step(update).items():
            if not isinstance(value, Tensor) or not any(own.get(key) for own in sums):
                continue
            expected = strided_sums(value)
            yield sum(sums[rank].get(key, {}).values(), torch.zeros_like(expected)), expected

    def _is_same(self, rank: int, update: int, alone: Recording) -> bool:
        """Whether one process computes a rank's own gradient."""
        pairs = list(self._pairs(rank, update, alone))
        scale = max((expected.abs().max().item() for _, expected in pairs), default=0.0)
        return all((own - expected).abs().max().item() <= _ALIKE * scale for own, expected in pairs)

    def _of_rank(self, rank: int, update: int, alone: Recording) -> Reason:
        factor = gradient_factor(list(self._pairs(rank, update, alone)))
        text = (
            f"rank {rank} computes another gradient of its samples than one process does of the same: code or random "
            "numbers depend on the rank"
        )
        if factor is not None and abs(factor - 1) > _ALIKE:
            times = f"{factor:.4g}" if factor else "zero"
            text = (
                f"the loss of rank {rank} is {times} times what one process computes of the same samples: code depends "
                "on the rank"
            )
        proof = f"one process was fed the samples of rank {rank} alone, up to step {update}"
        return Reason(text, self._line(rank, update), proof)

    def _line(self, rank: int, update: int) -> str:
        """The first line at which a rank computes something else than one process; "" for none."""
        override = f"{WORD} {update}"
        traced = self.runs.on_ranks(override)
        alone = self.runs.on_one(self.ranks, FOLLOW, override, order=(rank,))
        return first_other_line(traced.ranks[rank].of("call"), alone.first.of("call"))

    # -- a batch

    def _compares_samples(self) -> bool | None:
        """Whether the loss of rank 0 compares samples; None where that cannot be seen."""
        still, nudged = (self.runs.on_one(self.ranks, FOLLOW, word, order=(0,)) for word in (STILL, NUDGED))
        return compares_samples(still.first.of("rows"), nudged.first.of("rows"))

    def _draws_own(self) -> bool:
        """Whether steps draw random numbers, and ranks others, that could not be put together for one process."""
        if any(event["grad"] for event in self.whole.first.of(*KEPT)):
            return True
        paths = [sorted(rank.folder.glob("random-*.pkl")) for rank in self.ranks.ranks]
        states = {tuple(path.read_bytes() for path in own) for own in paths}
        return self.ranks.has(DRAWS) and len(states) > 1

    def _of_counts(self) -> Reason:
        return Reason(
            "a mean of means: each rank divides parts of its loss by its own counts (of tokens, boxes, masked "
            "samples), and the counts differ",
            self.ranks.first.where("backward"),
            "each rank computes what one process does of its samples, and no sample's loss follows another sample",
        )
