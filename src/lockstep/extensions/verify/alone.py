"""Comparison of each rank with one process on the same samples, to find code that depends on the rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.calls import TRACE, first_other_line
from lockstep.extensions.verify.causes import changed_by_some, gathered_without_gradient, gradient_factor, other_seeds
from lockstep.extensions.verify.compare import Reason, by_rank, own_gradients
from lockstep.extensions.verify.diagnose import Parts
from lockstep.extensions.verify.functions import KEPT, PERMUTED
from lockstep.extensions.verify.loaders import DRAWS
from lockstep.extensions.verify.nudge import NUDGED, STILL, compares_samples
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.steps import FOLLOW, strided_sums

_TOLERANCE = 1e-6
"""Largest difference that counts as equal, as a fraction of the largest gradient."""

IN_BATCH = (
    "the loss compares the samples of a batch with each other (in-batch negatives, statistics over a batch), so it is "
    "different for a larger batch; in all steps each rank's gradient equals that of one process with the same samples"
)
OWN_NUMBERS = (
    "in a step each rank draws its own random numbers from Python's or NumPy's generator, or from torch's for a whole "
    "batch, which one process cannot reproduce for all ranks together; in all steps each rank's gradient equals "
    "that of one process with the same samples and random numbers"
)
UNSEEN = (
    "each rank's gradient equals that of one process with the rank's samples, but their mean is not the gradient of "
    "one process with all samples. Either the loss compares the samples of a batch, or each rank divides it by its own "
    "counts. To find out which, add a layer whose output has one entry per sample, such as nn.Linear"
)


@dataclass(frozen=True)
class AloneFinding:
    """Result of comparing each rank with one process that gets only this rank's samples.

    Attributes:
        nature: why ranks and one process are expected to differ; "" if they are not.
        cause: why they differ otherwise; None if it was not found.
        unknown: why neither could be determined, or "".
    """

    nature: str = ""
    cause: Reason | None = None
    unknown: str = ""


class RanksAlone:
    """Check that each rank computes the same gradients as one process that gets only this rank's samples.

    Args:
        ranks: the run on ranks.
        single: the run of one process that was fed the samples of all ranks.
        runs: makes more runs.
    """

    def __init__(self, ranks: Recording, single: Recording, runs: Runs) -> None:
        self.ranks = ranks
        self.single = single
        self.runs = runs
        self.updates = ranks.fewest_steps

    def check(self) -> AloneFinding:
        """Compare each rank's gradients with those of one process that gets only this rank's samples.

        If they agree, check if the loss compares samples.
        """
        for update in range(self.updates):
            parts = Parts(self.ranks, update)
            # a gradient that is not the mean over ranks shows nothing about a rank's own
            if not parts.are_known or parts.not_averaged(own_gradients(self.ranks, update)):
                return AloneFinding()
        # a rank that skips a batch makes its step with later samples
        for step in range(self.updates):
            counts = [len(rank.find("batch", grad=True, step=step)) for rank in self.ranks.ranks]
            if len(set(counts)) > 1:
                skipped = Reason(
                    "ranks skip different batches, because the condition for skipping one uses a rank's own values "
                    "(such as its loss): use values that are the same on all ranks",
                    self.ranks.first.line_of("iteration"),
                    f"batches drawn for step {step}: {by_rank(enumerate(counts))}",
                )
                return AloneFinding(cause=skipped)
        # rank 0 last: code that depends on the rank often leaves rank 0 as it is
        for rank in reversed(range(len(self.ranks.ranks))):
            alone = self.runs.on_one(self.ranks, FOLLOW, order=(rank,))
            if refusals.check_single(alone):
                return AloneFinding()
            for update in range(min(self.updates, len(alone.first.steps))):
                pairs = list(self._pairs(rank, update, alone))
                scale = max((expected.abs().max().item() for _, expected in pairs), default=0.0)
                if any(not (own - expected).abs().max().item() <= _TOLERANCE * scale for own, expected in pairs):
                    return AloneFinding(cause=self._explain_rank(rank, update, gradient_factor(pairs)))
        still, nudged = (self.runs.on_one(self.ranks, FOLLOW, word, order=(0,)) for word in (STILL, NUDGED))
        made = str(self.ranks.first.find("backward")[0]["made"])
        compares = compares_samples(still.first.find("rows"), nudged.first.find("rows"))
        if compares:
            return AloneFinding(nature=f"{IN_BATCH} ({made})")
        if self._draws_own():
            return AloneFinding(nature=OWN_NUMBERS)
        if compares is None:
            return AloneFinding(unknown=UNSEEN)
        counts_differ = Reason(
            "a mean of means: each rank divides parts of its loss by its own counts (of tokens, boxes, masked "
            "samples), and the counts differ",
            made,
            "each rank's gradient is what one process computes for its samples, and no sample's loss depends on others",
        )
        return AloneFinding(cause=counts_differ)

    def _pairs(self, rank: int, update: int, alone: Recording) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (gradient on the rank, gradient in one process) for each parameter, both reduced by `strided_sums`."""
        sums = [each.sums(update) for each in self.ranks.ranks]
        for key, value in alone.first.unclipped_gradients(update).items():
            if not isinstance(value, Tensor) or not any(own.get(key) for own in sums):
                continue
            expected = strided_sums(value)
            yield sum(sums[rank].get(key, {}).values(), torch.zeros_like(expected)), expected

    def _explain_rank(self, rank: int, update: int, factor: float | None) -> Reason:
        """Explain why a rank's gradient differs from the gradient of one process with the same samples.

        ``factor`` is the ratio of the two gradients, or None if they are not proportional.
        """
        text = (
            f"rank {rank} computes a different gradient from one process with the same samples: code or random numbers "
            "depend on the rank"
        )
        if where := other_seeds(self.ranks):
            text += f" (their seeds differ: {where})"
        if factor is not None and abs(factor - 1) > _TOLERANCE:
            times = f"{factor:.4g}" if factor else "zero"
            text = (
                f"the loss on rank {rank} is {times} times the loss in one process for the same samples: code depends "
                "on the rank"
            )
        proof = f"one process was fed the samples of rank {rank} only, up to step {update}"
        if found := gathered_without_gradient(self.ranks, update, proof):
            return found
        # both runs again, with a trace of the update
        override = f"{TRACE} {update}"
        ranks = self.runs.on_ranks(override)
        # such as an average of weights that rank 0 alone updates
        if found := changed_by_some(ranks):
            return found
        alone = self.runs.on_one(self.ranks, FOLLOW, override, order=(rank,))
        line = first_other_line(ranks.ranks[rank].find("call", late=False), alone.first.find("call", late=False))
        return Reason(text, line, proof)

    def _draws_own(self) -> bool:
        """Return True if steps use random numbers that differ between ranks and that one process cannot reproduce."""
        if any(event["grad"] for event in self.single.first.find(*KEPT, PERMUTED)):
            return True
        paths = [sorted(rank.folder.glob("random-*.pkl")) for rank in self.ranks.ranks]
        states = {tuple(path.read_bytes() for path in own) for own in paths}
        return self.ranks.has(DRAWS) and len(states) > 1
