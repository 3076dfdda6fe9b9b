"""Simulation of many ranks: each runs two steps without the others, then the collectives are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.certificate import Certificate, Row
from lockstep.extensions.verify.compare import COLLECTIVES, Difference, Reason, shorten, uneven
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
        reason = refusals.check_ranks(ranks, STEPS)
        if not reason and not ranks.has("group"):
            reason = (
                "the script creates no process group, so its ranks would not be connected: call "
                "torch.distributed.init_process_group"
            )
        if not reason and not ranks.has("collective"):
            reason = "no rank calls a collective: wrap the model in DistributedDataParallel, or shard it"
        if reason:
            return self._certify_unknown(reason)
        found = self._other_collectives(ranks) or self._other_steps(ranks)
        if found is not None:
            return self._certify_different(*found)
        steps = ranks.fewest_steps
        if steps < STEPS:
            return self._certify_unknown(
                f"each rank makes {steps} of {STEPS} optimizer steps: use more data, or simulate fewer ranks"
            )
        calls = len(ranks.first.find("collective", whole=True))
        groups = len(ranks.first.find("collective", whole=False))
        rows = [Row("collectives of all ranks", str(calls), "the same on all ranks")]
        if groups:
            rows.append(Row("collectives of groups", str(groups), "called, but not compared"))
        rows.append(Row("optimizer steps", str(steps), "on all ranks"))
        return self.runs.certificate(STEPS, rows, compared=_COMPARED)

    def _certify_different(self, difference: Difference, reason: Reason) -> Certificate:
        return self.runs.certificate(STEPS, found=(difference, reason), compared=_COMPARED)

    def _certify_unknown(self, reason: str) -> Certificate:
        return self.runs.certificate(reasons=[reason], compared=_COMPARED)

    def _explain_failure(self, ranks: Recording, failed: Sequence[int]) -> Certificate:
        # a script that fails on one rank as well does not fail because of sizes
        alone = self.runs.on_simulated(1, STEPS)
        if alone.first.ending.has_failed:
            return self._certify_unknown(refusals.check_ranks(ranks, STEPS))
        ending = ranks.ranks[failed[0]].ending
        text = f"rank{_several(failed)} of {self.request.devices} failed: {ending.short}"
        cause = f"the script does not support {self.request.devices} ranks"
        difference = Difference(COLLECTIVES, -1, 0, "", tuple(failed), text=text)
        return self._certify_different(difference, Reason(cause, ending.where, "one rank by itself makes its steps"))

    def _other_collectives(self, ranks: Recording) -> tuple[Difference, Reason] | None:
        """Return (first difference between the ranks' collectives, its cause), or None if there is no difference."""
        calls = [rank.find("collective", whole=True) for rank in ranks.ranks]
        for number, events in enumerate(zip_longest(*calls)):
            ranks_by_call: dict[str, list[int]] = {}
            texts: dict[str, str] = {}
            for rank, event in enumerate(events):
                call = "none" if event is None else refusals.describe(event)
                # the same call may come from different lines: the first one is shown
                texts.setdefault(call, call if event is None else f"{call} at {event['where']}")
                ranks_by_call.setdefault(call, []).append(rank)
            if len(ranks_by_call) > 1:
                listed = "; ".join(f"rank{_several(who)}: {texts[call]}" for call, who in ranks_by_call.items())
                cause = (
                    "ranks call different collectives: a call that only some ranks make, or in a different order or "
                    "with a different shape, makes the other ranks wait or mixes up the data sent"
                )
                where = next((event["where"] for event in events if event is not None), "")
                difference = Difference(COLLECTIVES, -1, number, "", text=f"collective {number}: {listed}")
                return difference, Reason(cause, where)
        return None

    def _other_steps(self, ranks: Recording) -> tuple[Difference, Reason] | None:
        counts = defaultdict(list)
        for number, rank in enumerate(ranks.ranks):
            counts[len(rank.steps)].append(number)
        if len(counts) == 1:
            return None
        text = "; ".join(f"rank{_several(who)}: {count} optimizer steps" for count, who in sorted(counts.items()))
        least = min(counts)
        return Difference(OPTIMIZER_STEPS, -1, least, "", text=text), uneven(ranks.first.line_of("iteration"))


def _several(ranks: Sequence[int]) -> str:
    """Format rank numbers to follow the word "rank", starting with an "s" if there are several.

    Example:
        >>> "rank" + _several([3]), "rank" + _several([0, 1, 2, 3, 4, 5])
        ('rank 3', 'ranks 0, 1, 2, 3, ...')
    """
    return f"{'s' * (len(ranks) > 1)} {shorten(ranks, 4)}"
