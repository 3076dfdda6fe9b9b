"""Says whether a script works out on many ranks: each runs two steps without the others, and they are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from lockstep.verify import refusals
from lockstep.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row
from lockstep.verify.recordings import Event, Recording
from lockstep.verify.verification import Request, Verification

STEPS = 2
"""Optimizer steps of each rank."""
_SHOWN = 4


class Simulation:
    """Runs a script on each rank of many, where no other one is there; compares what they would have sent.

    Args:
        request: what is asked for; its devices are the ranks that are simulated.
        verification: makes the runs.
    """

    def __init__(self, request: Request, verification: Verification) -> None:
        self.request = request
        self.verification = verification

    def certify(self) -> Certificate:
        """The certificate."""
        ranks = self.verification.on_simulated(self.request.devices, STEPS)
        if refusals.is_of_types(ranks):
            self.verification.float64 = False
            ranks = self.verification.on_simulated(self.request.devices, STEPS)
        failed = [number for number, rank in enumerate(ranks.ranks) if rank.ending.status in ("failed", "killed")]
        if failed:
            return self._of_failure(ranks, failed)
        reason = refusals.of_ranks(ranks, STEPS) or self._without_collectives(ranks)
        if reason:
            return self._certificate(UNKNOWN, reasons=(reason,))
        different = self._of_collectives(ranks)
        if different is None:
            different = self._of_steps(ranks)
        return self._alike(ranks) if different is None else different

    def _certificate(
        self, verdict: str, first: str = "", cause: str = "", proof: str = "", reasons: tuple[str, ...] = ()
    ) -> Certificate:
        return Certificate(
            " ".join(self.request.words),
            self.request.devices,
            0 if reasons else STEPS,
            verdict,
            "float64" if self.verification.float64 else "own",
            first=first,
            cause=cause,
            proof=proof,
            reasons=reasons,
            simulated=True,
        )

    def _of_failure(self, ranks: Recording, failed: Sequence[int]) -> Certificate:
        """Some ranks failed: so do sizes that do not work out, unless one rank fails as well."""
        alone = self.verification.on_simulated(1, STEPS)
        if alone.first.ending.status in ("failed", "killed"):
            return self._certificate(UNKNOWN, reasons=(refusals.of_ranks(ranks, STEPS),))
        ending = ranks.ranks[failed[0]].ending
        message = ending.message.strip().splitlines()[0][:200]
        where = f" ({ending.where})" if ending.where else ""
        return self._certificate(
            DIFFERENT,
            f"rank{_several(failed)} of {self.request.devices} failed: {message}",
            f"the script does not work out on {self.request.devices} ranks{where}",
            "one rank alone makes its steps",
        )

    def _without_collectives(self, ranks: Recording) -> str:
        if not ranks.has("group"):
            return "the script makes no process group (torch.distributed.init_process_group): ranks would not meet"
        if not ranks.has("collective"):
            return "no rank makes a collective: wrap the model in DistributedDataParallel, or shard it"
        return ""

    def _of_collectives(self, ranks: Recording) -> Certificate | None:
        """The first place where ranks make other collectives."""
        calls = [[event for event in rank.of("collective") if event["whole"]] for rank in ranks.ranks]
        for number, events in enumerate(zip_longest(*calls)):
            told = _by_call(events)
            if len(told) > 1:
                text = "; ".join(f"rank{_several(who)}: {call}" for call, who in told.items())
                cause = (
                    "ranks make other collectives: a call that only some ranks make, in another order, or with another "
                    "shape, makes the others wait, or mixes up what is sent"
                )
                where = next((event["where"] for event in events if event is not None and event["where"]), "")
                return self._certificate(DIFFERENT, f"collective {number}: {text}", f"{cause} ({where})")
        return None

    def _of_steps(self, ranks: Recording) -> Certificate | None:
        counts = defaultdict(list)
        for number, rank in enumerate(ranks.ranks):
            counts[len(rank.steps)].append(number)
        if len(counts) == 1:
            return None
        text = "; ".join(f"rank{_several(who)}: {count} optimizer steps" for count, who in sorted(counts.items()))
        cause = "ranks get several numbers of batches: give all as many (DistributedSampler), or train within Join"
        return self._certificate(DIFFERENT, text, cause)

    def _alike(self, ranks: Recording) -> Certificate:
        steps = min(len(rank.steps) for rank in ranks.ranks)
        if steps < STEPS:
            reason = f"each rank makes {steps} of {STEPS} optimizer steps: give it more data, or fewer ranks"
            return self._certificate(UNKNOWN, reasons=(reason,))
        calls = sum(1 for event in ranks.first.of("collective") if event["whole"])
        groups = sum(1 for event in ranks.first.of("collective") if not event["whole"])
        rows = [Row("collectives of all ranks", str(calls), "the same on all ranks")]
        rows += [Row("collectives of groups", str(groups), "made, and not compared")] if groups else []
        return replace(self._certificate(ALIKE), rows=(*rows, Row("optimizer steps", str(steps), "on all ranks")))


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
