"""Simulation of many ranks: each runs two steps without the others, then the collectives are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.certificate import Certificate, Row
from lockstep.extensions.verify.compare import COLLECTIVES, Difference, Reason, several, uneven
from lockstep.extensions.verify.compare import STEPS as OPTIMIZER_STEPS
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.runs import Request, Runs

STEPS = 2
"""Optimizer steps of each rank."""
_COMPARED = "simulated ranks"


class Simulation:
    """Check that runs a script on many ranks, each without the others, and compares the ranks' collectives.

    Args:
        request: what to verify; its devices are the ranks to simulate.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs

    def certify(self) -> Certificate:
        """Run the script on the simulated ranks, and return the certificate."""
        ranks = self.runs.on_simulated(self.request.devices, STEPS)
        if refusals.is_type_error(ranks):
            self.runs.float64 = False
            ranks = self.runs.on_simulated(self.request.devices, STEPS)
        failed = [number for number, rank in enumerate(ranks.ranks) if rank.ending.has_failed]
        if failed:
            return self._explain_failure(ranks, failed)
        reason = refusals.check_ranks(ranks)
        if not reason and not ranks.has("collective"):
            reason = "no rank calls a collective: create a process group, and wrap the model in DistributedDataParallel"
        if reason:
            return self._certify_unknown(reason)
        mismatch = refusals.first_mismatch(ranks)
        found = refusals.other_collectives(*mismatch, -1) if mismatch else self._other_steps(ranks)
        if found is not None:
            return self._certify_different(*found)
        calls = len(ranks.first.find("collective", whole=True))
        rows = [Row("collectives of all ranks", str(calls), "the same on all ranks")]
        rows.append(Row("optimizer steps", str(ranks.fewest_steps), "on all ranks"))
        return self.runs.certificate(ranks.fewest_steps, rows, compared=_COMPARED)

    def _certify_different(self, difference: Difference, reason: Reason) -> Certificate:
        return self.runs.certificate(STEPS, found=(difference, reason), compared=_COMPARED)

    def _certify_unknown(self, reason: str) -> Certificate:
        return self.runs.certificate(reasons=[reason], compared=_COMPARED)

    def _explain_failure(self, ranks: Recording, failed: Sequence[int]) -> Certificate:
        # a script that fails on one rank as well does not fail because of sizes
        alone = self.runs.on_simulated(1, STEPS)
        if alone.first.ending.has_failed:
            return self._certify_unknown(refusals.check_ranks(ranks))
        ending = ranks.ranks[failed[0]].ending
        text = f"rank{several(failed)} of {self.request.devices} failed: {ending.short}"
        cause = f"the script does not support {self.request.devices} ranks"
        difference = Difference(COLLECTIVES, -1, 0, "", tuple(failed), text=text)
        return self._certify_different(difference, Reason(cause, ending.where, "one rank by itself makes its steps"))

    def _other_steps(self, ranks: Recording) -> tuple[Difference, Reason] | None:
        counts = defaultdict(list)
        for number, rank in enumerate(ranks.ranks):
            counts[len(rank.steps)].append(number)
        if len(counts) == 1:
            return None
        text = "; ".join(f"rank{several(who)}: {count} optimizer steps" for count, who in sorted(counts.items()))
        least = min(counts)
        return Difference(OPTIMIZER_STEPS, -1, least, "", text=text), uneven(ranks.first.line_of("iteration"))
