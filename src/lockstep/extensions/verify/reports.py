"""Comparison of the numbers that a script prints with those of one process."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.extensions.verify.certificate import Row
from lockstep.extensions.verify.compare import REPORTS, Difference, Reason, by_rank
from lockstep.extensions.verify.functions import KEPT
from lockstep.extensions.verify.loaders import DRAWS
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.samples import SampleFindings

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOSE = 1e-6
"""Largest relative difference of two equal metrics. Metrics may be computed in float32 by NumPy."""
_ROUNDING = 1e-9
"""Largest relative difference of two equal numbers that are printed with all digits."""


def _as_is(value: float) -> float:
    return value


def _percent(value: float) -> float:
    return 100 * value


def _exp(value: float) -> float:
    return math.exp(min(value, 500.0))


def _root(value: float) -> float:
    return math.sqrt(max(value, 0.0))


_FORMS: tuple[Callable[[float], float], ...] = (_as_is, _percent, _exp, _root)
"""Functions by which a printed number may be computed from a reduced one, as perplexity is from a mean loss."""


@dataclass(frozen=True)
class Line:
    """Line that a process printed.

    Attributes:
        text: the line.
        numbers: the numbers in it, as they are printed.
    """

    text: str
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Contribution:
    """Numbers that a rank passes to a collective after it has evaluated.

    Attributes:
        values: the numbers.
        samples: number of samples that the rank has evaluated; 0 if they do not come from a loader.
    """

    values: tuple[float, ...]
    samples: int


class Reports:
    """Check of the numbers that rank 0 prints.

    A number that differs from that of one process need not be wrong: it may be rank 0's own, or a time. It is wrong if

    - it shows the mean or the sum of the numbers that the ranks pass to a collective after an evaluation, and
    - one process prints at the same place the number that it passes to the same collective, which is another one, and
    - one process passes the same number if it evaluates the ranks' batches one after another. So this number depends
      on the samples only. A mean of the means of batches would depend on the batches.

    A number that is wrong in another way, such as a local sum divided by a reduced count, is not found.

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
        self.notes: list[str] = []
        # the numbers with a fraction: others are counts of steps, epochs or samples
        self._pairs = [
            (line.text, theirs, own)
            for line, other in _common(ranks.first, single.first)
            for theirs, own in zip(line.numbers, other.numbers, strict=True)
            if "." in theirs + own
        ]

    def rows(self, found: Difference | None) -> list[Row]:
        """Return the certificate's row about printed numbers, or [] if none is equal and none is wrong."""
        equal = sum(not _differ(theirs, own) for _, theirs, own in self._pairs)
        if found is None and not equal:
            return []
        outcome = "equal to the printed digits" if found is None else f"DIFFERENT: {found}"
        return [Row(REPORTS, f"{equal} of {len(self._pairs)}", outcome)]

    # -- numbers that are wrong

    def badly_reduced(self) -> tuple[Difference, Reason] | None:
        """Find a printed number that is a mean or sum of the ranks' own numbers, but not the number of one process."""
        evaluated = {event["loader"] for _, event in self.ranks.find("iteration")} - self.samples.trains
        runs = self.runs
        is_random = any(self.single.has(kind) for kind in (*KEPT, "batch norm")) or self.ranks.has(DRAWS)
        # without float64, and with random numbers, numbers differ in any case
        if not evaluated or not runs.float64 or runs.rank_by_rank or is_random:
            return None
        candidates = list(self._candidates())
        if not candidates:
            return None
        again = _contributions(runs.on_one(self.ranks, split=tuple(evaluated)).first, set())
        for where, call, at, value, found in candidates:
            calls = again.get(where, [])
            if len(calls) > call and _is_close(calls[call].values[at], value):
                return found
        return None

    def _candidates(self) -> Iterator[tuple[str, int, int, float, tuple[Difference, Reason]]]:
        """Yield (line, call, position, number of one process, finding) for each printed number that may be wrong."""
        ranks = [_contributions(rank, self.samples.trains) for rank in self.ranks.ranks]
        single = _contributions(self.single.first, set())
        for where, calls in single.items():
            own = [rank.get(where, []) for rank in ranks]
            if any(len(each) != len(calls) for each in own):
                continue
            for call, one in enumerate(calls):
                there = [each[call] for each in own]
                if any(len(each.values) != len(one.values) or not each.samples for each in there):
                    continue
                for at, value in enumerate(one.values):
                    counts = [each.samples for each in there]
                    found = self._explain([each.values[at] for each in there], counts, value, where)
                    if found is not None:
                        yield where, call, at, value, found

    def _explain(
        self, values: Sequence[float], counts: Sequence[int], value: float, where: str
    ) -> tuple[Difference, Reason] | None:
        """Explain a printed number that is a function of the ranks' ``values``, where one process has ``value``.

        Args:
            values: the number of each rank.
            counts: number of samples that each rank has evaluated.
            value: the number of one process.
            where: line of the collective.
        """
        total, samples = sum(values), sum(counts)
        mean = total / len(values)
        if _is_close(total, value):
            reduced, value = total / counts[0], value / samples
            what = "the sum over all ranks"
            cause = "the sum over all ranks is divided by the number of samples of rank 0: reduce this number as well"
        elif not _is_close(mean, value) and self._shown(mean, value):
            reduced, what = mean, "their mean"
            cause = (
                "the mean of the ranks' own numbers is not the number of all samples: reduce sums and counts, or "
                "gather the predictions, and compute the number once"
            )
            weighted = sum(each * count for each, count in zip(values, counts, strict=True)) / samples
            if _is_close(weighted, value):
                cause = (
                    "the number is a mean of means, each over a different number of samples: reduce the sums and the "
                    "counts, and divide once"
                )
        else:
            reduced, what = total, "their sum"
            cause = "the sum of the ranks' own numbers is not the number of all samples"
            if min(values) <= value * (1 + _CLOSE) and value <= max(values) * (1 + _CLOSE):
                cause = "the sum of the ranks' means is not divided by the number of ranks"
        shown = self._shown(reduced, value)
        if shown is None:
            return None
        text, theirs, number = shown
        step = len(self.ranks.first.steps)
        difference = Difference(
            REPORTS, step, step, "", text=f"the ranks print {theirs} in {text.strip()!r}, one process {number}"
        )
        each_rank = by_rank(
            (rank, f"{each:.6g} over {count} samples")
            for rank, (each, count) in enumerate(zip(values, counts, strict=True))
        )
        proof = f"{each_rank}; {what}: {reduced:.6g}; one process: {value:.6g}, also with the ranks' batches"
        return difference, Reason(cause, where, proof)

    def _shown(self, theirs: float, own: float) -> tuple[str, str, str] | None:
        """Return (line, number, number of one process) where the ranks print ``theirs`` and one process ``own``."""
        for text, number, other in self._pairs:
            for form in _FORMS:
                if _differ(number, other) and _shows(number, form(theirs)) and _shows(other, form(own)):
                    return text, number, other
        return None

    def counted_twice(self) -> tuple[Difference, Reason] | None:
        """Find a printed number in which some samples count twice because several ranks evaluate them.

        Such a number is equal on ranks and in one process, but differs if each sample is evaluated once.
        """
        padded = self.samples.padded
        if not padded:
            return None
        once = self.runs.on_one(self.ranks, deduplicated=tuple(each.loader for each in padded)).first
        for lines in _common(self.ranks.first, self.single.first, once):
            for theirs, own, correct in zip(*(line.numbers for line in lines), strict=True):
                if theirs == own != correct:
                    step = len(self.ranks.first.steps)
                    text = f"{padded[0]}, which counts in {lines[0].text.strip()!r}"
                    cause = (
                        "DistributedSampler repeats samples to give all ranks the same number, and metrics count them "
                        "twice: remove the repeated samples, or evaluate samples[rank::world_size] on each rank"
                    )
                    difference = Difference(REPORTS, step, step, str(padded[0].sample), text=text)
                    return difference, Reason(cause, padded[0].where)
        self.notes.append(f"{padded[0]}: no printed number shows it")
        return None

    # -- numbers of rank 0 alone

    def note_local(self) -> None:
        """Add a note if ranks evaluate different samples, no collective follows, and rank 0 prints another number."""
        ranks = self.ranks
        batches = [
            [event["prints"] for event in rank.find("batch") if event["loader"] not in self.samples.trains]
            for rank in ranks.ranks
        ]
        is_shared = not all(batches) or all(each == batches[0] for each in batches)
        if is_shared or any(event["name"] != "barrier" for _, event in ranks.find("collective", evaluates=True)):
            return
        everywhere = {_words(text) for rank in ranks.ranks[1:] for text in rank.printed}
        found = [each for each in self._pairs if _differ(*each[1:]) and _words(each[0]) not in everywhere]
        if found:
            text, theirs, own = max(reversed(found), key=lambda each: len(each[1]))
            self.notes.append(
                f"each rank evaluates its own samples, and no collective combines the results: {theirs} in "
                f"{text.strip()!r} is rank 0's own number (one process: {own})"
            )


def _contributions(rank: RankRecording, trains: set[int]) -> dict[str, list[Contribution]]:
    """Return the numbers that a rank passes to collectives after evaluations, in the order of the calls, by line.

    Args:
        rank: the rank.
        trains: numbers of the loaders of training.
    """
    found: dict[str, list[Contribution]] = defaultdict(list)
    newest, samples = (0, 0), 0
    for event in rank.events:
        if event["kind"] == "batch":
            iteration = event["loader"], event["iteration"]
            samples = len(event["prints"]) + (samples if iteration == newest else 0)
            newest = iteration
        elif event["kind"] == "collective" and event["values"]:
            evaluated = samples if newest[0] not in trains else 0
            found[event["where"]].append(Contribution(tuple(event["values"]), evaluated))
    return found


# -- printed lines


def _words(text: str) -> str:
    """Return a line without its numbers, and with single spaces."""
    return " ".join(_NUMBER.sub("#", text).split())


def _lines(rank: RankRecording) -> dict[tuple[str, int], Line]:
    """Return a rank's printed lines, by (words, number among the lines with these words)."""
    found: dict[tuple[str, int], Line] = {}
    counts: Counter[str] = Counter()
    for text in (*rank.printed, *rank.errors):
        words = _words(text)
        found[words, counts[words]] = Line(text, tuple(_NUMBER.findall(text)))
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


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-12)
