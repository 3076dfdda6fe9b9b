"""Says whether a script works out on many ranks: each runs two steps without the others, and they are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.certificate import Certificate, Row
from lockstep.extensions.verify.compare import COLLECTIVES, Difference, Reason, uneven
from lockstep.extensions.verify.compare import STEPS as OPTIMIZER_STEPS
from lockstep.extensions.verify.recordings import Event, Recording
from lockstep.extensions.verify.runs import Request, Runs

STEPS = 2
"""Optimizer steps of each rank."""
_SHOWN = 4
_COMPARED = "simulated ranks"


class Simulation:
    """Runs a script on each rank of many, where no other one is there; compares what they would have sent.

    Args:
        request: what is asked for; its devices are the ranks that are simulated.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs

    def certify(self) -> Certificate:
        """The certificate."""
        ranks = self.runs.on_simulated(self.request.devices, STEPS)
        if refusals.is_of_types(ranks):
            self.runs.float64 = False
            ranks = self.runs.on_simulated(self.request.devices, STEPS)
        failed = [number for number, rank in enumerate(ranks.ranks) if rank.ending.has_failed]
        if failed:
            return self._of_failure(ranks, failed)
        reason = refusals.of_ranks(ranks, STEPS) or self._without_collectives(ranks)
        if reason:
            return self._unknown(reason)
        found = self._of_collectives(ranks) or self._of_steps(ranks)
        return self._alike(ranks) if found is None else self._different(*found)

    def _different(self, difference: Difference, reason: Reason) -> Certificate:
        return self.runs.certificate(STEPS, found=(difference, reason), compared=_COMPARED)

    def _unknown(self, reason: str) -> Certificate:
        return self.runs.certificate(reasons=[reason], compared=_COMPARED)

    def _of_failure(self, ranks: Recording, failed: Sequence[int]) -> Certificate:
        """Some ranks failed: so do sizes that do not work out, unless one rank fails as well."""
        alone = self.runs.on_simulated(1, STEPS)
        if alone.first.ending.has_failed:
            return self._unknown(refusals.of_ranks(ranks, STEPS))
        ending = ranks.ranks[failed[0]].ending
        text = f"rank{_several(failed)} of {self.request.devices} failed: {ending.short}"
        cause = f"the script does not work out on {self.request.devices} ranks"
        difference = Difference(COLLECTIVES, -1, 0, "", tuple(failed), text=text)
        return self._different(difference, Reason(cause, ending.where, "one rank alone makes its steps"))

    def _without_collectives(self, ranks: Recording) -> str:
        if not ranks.has("group"):
            return "the script makes no process group (torch.distributed.init_process_group): ranks would not meet"
        if not ranks.has("collective"):
            return "no rank makes a collective: wrap the model in DistributedDataParallel, or shard it"
        return ""

    def _of_collectives(self, ranks: Recording) -> tuple[Difference, Reason] | None:
        """The first place where ranks make other collectives."""
        calls = [rank.of("collective", whole=True) for rank in ranks.ranks]
        for number, events in enumerate(zip_longest(*calls)):
            told = _by_call(events)
            if len(told) > 1:
                by_call = "; ".join(f"rank{_several(who)}: {call}" for call, who in told.items())
                cause = (
                    "ranks make other collectives: a call that only some ranks make, in another order, or with another "
                    "shape, makes the others wait, or mixes up what is sent"
                )
                where = next((event["where"] for event in events if event is not None), "")
                text = f"collective {number}: {by_call}"
                return Difference(COLLECTIVES, -1, number, "", text=text), Reason(cause, where)
        return None

    def _of_steps(self, ranks: Recording) -> tuple[Difference, Reason] | None:
        counts = defaultdict(list)
        for number, rank in enumerate(ranks.ranks):
            counts[len(rank.steps)].append(number)
        if len(counts) == 1:
            return None
        text = "; ".join(f"rank{_several(who)}: {count} optimizer steps" for count, who in sorted(counts.items()))
        least = min(counts)
        return Difference(OPTIMIZER_STEPS, -1, least, "", text=text), uneven(ranks.first.where("iteration"))

    def _alike(self, ranks: Recording) -> Certificate:
        steps = ranks.fewest_steps
        if steps < STEPS:
            return self._unknown(
                f"each rank makes {steps} of {STEPS} optimizer steps: give it more data, or fewer ranks"
            )
        calls = len(ranks.first.of("collective", whole=True))
        groups = len(ranks.first.of("collective", whole=False))
        rows = [Row("collectives of all ranks", str(calls), "the same on all ranks")]
        if groups:
            rows.append(Row("collectives of groups", str(groups), "made, and not compared"))
        rows.append(Row("optimizer steps", str(steps), "on all ranks"))
        return self.runs.certificate(STEPS, rows, compared=_COMPARED)


def _by_call(events: Iterable[Event | None]) -> dict[str, list[int]]:
    """The ranks by what they call at one place."""
    found: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for number, event in enumerate(events):
        key = "none" if event is None else refusals.described(event)
        texts.setdefault(key, key if event is None else f"{key} at {event['where']}")
        found.setdefault(key, []).append(number)
    return {texts[key]: who for key, who in found.items()}


def _several(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words.

    Example:
        >>> "rank" + _several([3]), "rank" + _several([0, 1, 2, 3, 4, 5])
        ('rank 3', 'ranks 0, 1, 2, 3, ...')
    """
    told = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"{'s' * (len(ranks) > 1)} {told}"
