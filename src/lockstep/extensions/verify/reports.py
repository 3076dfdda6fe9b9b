"""Comparison of the numbers that rank 0 prints with those of one process."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence

from lockstep.extensions.verify.certificate import Row
from lockstep.extensions.verify.compare import REPORTS, Difference, Reason, by_rank
from lockstep.extensions.verify.functions import KEPT
from lockstep.extensions.verify.loaders import DEDUPLICATED, DRAWS, SPLIT
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.samples import SampleFindings
from lockstep.extensions.verify.settings import call_lines

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOSE = 1e-6
"""Largest relative difference of two equal metrics, which NumPy may have computed in float32."""
_ROUNDING = 1e-9
"""Largest relative difference of two equal numbers that are printed with all digits."""

Line = tuple[str, list[str]]
"""A printed line, and the numbers in it."""
Pair = tuple[str, str, str]
"""A line that rank 0 printed, a number in it, and the number that another process printed in its place."""
Passed = tuple[float, int]
"""A number that a rank passes to a collective, with the number of samples that the rank has evaluated."""
Sums = tuple[float, float]
"""The sum of the numbers that the ranks pass to a collective, and the number that one process passes."""
Reduced = dict[tuple[str, int, int, int], Passed]
"""Numbers that a process passes to collectives after evaluations, each with the number of samples that it evaluated.

The key is (line of the collective, number of its call, number of values in the call, position among these).
"""


class Reports:
    """Check of the numbers that rank 0 prints.

    A number that is not that of one process need not be wrong: it may be rank 0's own, or a time. It is called wrong if
    all of these hold:

    - It shows the mean or sum of the numbers that the ranks passed to a collective after an evaluation, or their sum
      divided by the number of samples of rank 0. It may also show 100 times this value, its exp, or its root.
    - In its place, one process prints the number that it passed to the same collective, which is another one.
    - One process prints and passes the same number if it evaluates the ranks' batches one after another. So the number
      depends on the samples only, unlike a mean over batches.

    If one process does not call the collective, its number is taken to be the mean of the ranks' numbers, weighted by
    their numbers of samples.

    A sum may also be divided by another sum of the same call. Other wrong numbers are not found, for example the
    quotient of a local sum and a reduced count.

    Args:
        ranks: the run on ranks.
        single: the run of one process.
        samples: findings about the samples of both runs.
        runs: makes further runs.
    """

    def __init__(self, ranks: Recording, single: Recording, samples: SampleFindings, runs: Runs) -> None:
        self.ranks = ranks
        self.single = single
        self.samples = samples
        self.runs = runs
        self._pairs = self._compared(single.first)

    def _compared(self, process: RankRecording) -> list[Pair]:
        """Return the numbers that rank 0 and another process print in the same places."""
        # numbers with a fraction: others are counts of steps, epochs or samples
        return [
            (text, theirs, own)
            for (text, numbers), (_, others) in _common(self.ranks.first, process)
            for theirs, own in zip(numbers, others, strict=True)
            if "." in theirs + own
        ]

    def rows(self, found: Difference | None) -> list[Row]:
        """Return the certificate's row about printed numbers, or [] if none is equal and none is wrong."""
        equal, total = sum(not _differ(theirs, own) for _, theirs, own in self._pairs), len(self._pairs)
        agreement = f"equal to the printed digits{'; others are not judged' * (equal < total)}"
        outcome = agreement if found is None else f"DIFFERENT: {found}"
        return [Row(REPORTS, f"{equal} of {total}", outcome)] if found or equal else []

    def badly_reduced(self) -> tuple[Difference, Reason] | None:
        """Find a printed number that is a mean or sum of the ranks' own numbers, but not the number of one process."""
        kinds = (*KEPT, "batch norm")
        is_random = self.ranks.has(DRAWS) or any(self.single.has(kind) for kind in kinds)
        # numbers in smaller types, and random ones, differ in any case
        if is_random or not self.runs.float64 or self.runs.rank_by_rank:
            return None
        ranks = [_reduced(rank, self.samples.trains) for rank in self.ranks.ranks]
        single, again = _reduced(self.single.first), None
        loaders = {event["loader"] for _, event in self.ranks.find("iteration")} - self.samples.trains
        everywhere = [key for key in ranks[0] if key in single and all(key in rank for rank in ranks)]
        totals = {key: sum(rank[key][0] for rank in ranks) for key in everywhere}
        for key in ranks[0]:
            there = [rank[key] for rank in ranks if key in rank]
            if len(there) < len(ranks) or not all(samples for _, samples in there):
                continue
            total = sum(count for _, count in there)
            weighted = sum(each * count for each, count in there) / total
            # many scripts call collectives only if there are several ranks
            value, own = single.get(key, (weighted, total))
            # without a loader the numbers have to show that one process evaluates the samples of all ranks
            if not loaders and (own != total or not _is_close(weighted, value)):
                continue
            others = [(total, single[other][0]) for other, total in totals.items() if other[:3] == key[:3]]
            found = self._explain(there, value, key[0], self._pairs, others)
            if found is None:
                continue
            if again is None:
                again = self.runs.on_one(self.ranks, *(f"{SPLIT} {each}" for each in loaders)).first
            is_same = _is_close(_reduced(again).get(key, (value, 0))[0], value)
            if is_same and self._explain(there, value, key[0], self._compared(again), others):
                return found
        return None

    def _explain(
        self, there: Sequence[Passed], value: float, where: str, pairs: Sequence[Pair], others: Sequence[Sums]
    ) -> tuple[Difference, Reason] | None:
        """Explain a printed number that is computed from the ranks' numbers. Return None if no number is.

        Args:
            there: number of each rank, with its number of samples.
            value: number of one process.
            where: line of the collective.
            pairs: the printed numbers.
            others: sums over the ranks, and numbers of one process, that the same call of the collective has passed.
        """
        total, samples = sum(each for each, _ in there), sum(count for _, count in there)
        if _is_close(total, value):
            text = "the sum over all ranks is divided by the number of samples of rank 0: reduce this number as well"
            causes = [(total / there[0][1], value / samples, text)]
        else:
            weighted = sum(each * count for each, count in there) / samples
            kind = "means over different numbers of samples" if _is_close(weighted, value) else "the ranks' own numbers"
            text = f"of {kind} is not the value for all samples: reduce sums and counts, or gather the predictions"
            causes = [(total / len(there), value, f"the mean {text}"), (total, value, f"the sum {text}")]
            text = "the sum over all ranks is not that of one process: ranks evaluate with other weights or inputs"
            causes += [(total / other, value / own, text) for other, own in others if other and own]
        for reduced, own, cause in causes:
            for line, theirs, number in pairs:
                forms = zip(_forms(reduced), _forms(own), strict=True)
                if not _differ(theirs, number) or not any(_shows(theirs, a) and _shows(number, b) for a, b in forms):
                    continue
                text = f"the ranks print {theirs} in {line.strip()!r}, one process {number}"
                passed = by_rank(enumerate(f"{each:.6g} for {count} samples" for each, count in there))
                proof = f"{passed}; one process: {value:.6g} for all samples"
                return self._difference(text), Reason(cause, where, proof)
        return None

    def _difference(self, text: str, name: str = "") -> Difference:
        return Difference(REPORTS, -1, len(self.ranks.first.steps), name, text=text)

    def counted_twice(self) -> tuple[Difference, Reason] | None:
        """Find a printed number in which some samples count twice because several ranks evaluate them.

        Such a number is equal on ranks and in one process, but differs if each sample is evaluated once.
        """
        padded = self.samples.padded
        once = self.runs.on_one(self.ranks, *(f"{DEDUPLICATED} {each.loader}" for each in padded)).first
        for (line, theirs), (_, own), (_, correct) in _common(self.ranks.first, self.single.first, once):
            if any(a == b != c for a, b, c in zip(theirs, own, correct, strict=True)):
                cause = (
                    "the sampler repeats samples to give all ranks the same number, and metrics count them twice: "
                    "remove the repeated samples, or evaluate samples[rank::world_size] on each rank"
                )
                text = f"{padded[0]}, which counts in {line.strip()!r}"
                lines = [call_lines(each["stack"]) for each in self.ranks.first.find("collective", evaluates=True)]
                where = " and ".join([padded[0].where, *lines[:1]])
                return self._difference(text, str(padded[0].sample)), Reason(cause, where)
        return None

    def local(self) -> str:
        """Return a note on a number that rank 0 prints last, if each rank evaluates other samples and none is reduced.

        Return "" if there is no such number.
        """
        trains = self.samples.trains
        batches = [
            [event["prints"] for event in rank.find("batch") if event["loader"] not in trains]
            for rank in self.ranks.ranks
        ]
        is_same = not all(batches) or all(each == batches[0] for each in batches)
        is_reduced = any(event["name"] != "barrier" for _, event in self.ranks.find("collective", evaluates=True))
        own_lines = {_words(text) for rank in self.ranks.ranks[1:] for text in rank.printed}
        found = [each for each in self._pairs if each[0] == self._pairs[-1][0] and _differ(*each[1:])]
        if is_same or is_reduced or not found or _words(found[0][0]) in own_lines:
            return ""
        line, theirs, own = found[0]
        where = next(each["where"] for each in self.ranks.first.find("iteration") if each["loader"] not in trains)
        return (
            f"each rank evaluates its own samples ({where}), and no collective combines the results: {theirs} in "
            f"{line.strip()!r} is rank 0's own number (one process: {own})"
        )


def _reduced(rank: RankRecording, trains: Collection[int] = ()) -> Reduced:
    """Return the numbers that a process passed to collectives. ``trains`` are the numbers of loaders of training."""
    found: Reduced = {}
    calls: Counter[str] = Counter()
    newest, samples = (-1, 0), 0
    rows: list[int] = []
    for event in rank.find("batch", "backward", "evaluated", "collective"):
        if event["kind"] == "batch":
            iteration = event["loader"], event["iteration"]
            samples = 0 if event["loader"] in trains else len(event["prints"]) + samples * (iteration == newest)
            newest = iteration
        elif event["kind"] == "backward":
            rows = []
        elif event["kind"] == "evaluated":
            rows.append(event["rows"])
        elif event["values"]:
            where, values = call_lines(event["stack"]), event["values"]
            # several calls of a model may be batches, whose mean depends on how they are cut
            count = samples or (rows[0] if len(rows) == 1 else 0)
            for at, value in enumerate(values):
                found[where, calls[where], len(values), at] = value, count
            calls[where] += 1
    return found


# -- printed lines


def _words(text: str) -> str:
    """Return a line without its numbers, and with single spaces."""
    return " ".join(_NUMBER.sub("#", text).split())


def _lines(rank: RankRecording) -> dict[tuple[str, int], Line]:
    """Return a process's printed lines, by (words, number among the lines with these words)."""
    found: dict[tuple[str, int], Line] = {}
    counts: Counter[str] = Counter()
    for text in (*rank.printed, *rank.errors):
        words = _words(text)
        found[words, counts[words]] = text, _NUMBER.findall(text)
        counts[words] += 1
    return found


def _common(*processes: RankRecording) -> list[tuple[Line, ...]]:
    """Return the lines that have the same words in all processes, as tuples with the line of each process."""
    found = [_lines(each) for each in processes]
    return [tuple(lines[key] for lines in found) for key in found[0] if all(key in lines for lines in found)]


def _unit(number: str) -> float:
    """Return the value of one unit in the last printed place."""
    mantissa, _, exponent = number.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _differ(number: str, other: str) -> bool:
    """Return True if two printed numbers differ by more than rounding may cause."""
    a, b = float(number), float(other)
    return abs(a - b) > max(1.5 * max(_unit(number), _unit(other)), _ROUNDING * abs(a))


def _shows(number: str, value: float) -> bool:
    """Return True if a number was printed for a value."""
    return abs(float(number) - value) <= 0.51 * _unit(number) + _CLOSE * abs(value)


def _forms(value: float) -> tuple[float, ...]:
    """Return the numbers that may be printed for a value: itself, in percent, the perplexity, and the root."""
    return value, 100 * value, math.exp(min(value, 99.0)), math.sqrt(max(value, 0.0))


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-12)
