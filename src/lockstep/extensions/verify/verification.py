"""Runs a script on N ranks and as one process, compares the two, and gives the certificate."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lockstep.extensions.verify import evaluation, refusals
from lockstep.extensions.verify.alone import AloneFinding, RanksAlone
from lockstep.extensions.verify.calls import LATE
from lockstep.extensions.verify.causes import Causes
from lockstep.extensions.verify.certificate import Certificate
from lockstep.extensions.verify.compare import (
    BUFFERS,
    CLIPPED,
    EXACT,
    GRADIENTS,
    PARAMETERS,
    RATES,
    SAMPLES,
    Comparison,
    Difference,
    Numbers,
    Reason,
    Tolerance,
    are_alike,
    exactly,
)
from lockstep.extensions.verify.nature import notes_of
from lockstep.extensions.verify.processes import Server, ServerDied
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Request, Runs
from lockstep.extensions.verify.samples import SampleFindings, Samples

_SPREAD = 30.0
"""How many times the spread of rounding passes."""
_OWN_PRECISION = 1e-5
"""The least that passes where a script calculates in its own precision."""
_CERTAIN = 1e-5
"""A difference above it is no rounding of float64, and one below it is compared with the spread of rounding."""
_UNTOUCHED = 0.1
"""The part of a model's elements that may get no gradient."""


class Check(Protocol):
    """Makes runs, and says what they show."""

    def certify(self) -> Certificate:
        """The certificate."""


def verify(
    request: Request, check: Callable[[Request, Runs], Check] | None = None, server: Server | None = None
) -> Certificate:
    """Run, compare, and certify.

    Args:
        request: what is asked for.
        check: of which kind; None: `Verification`, which compares ranks with one process.
        server: starts processes; None: one that ends behind it.
    """
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-")) if request.keep is None else request.keep.resolve()
    try:
        with Server() if server is None else nullcontext(server) as starts:
            runs = Runs(request, folder, starts)
            certificate = _certified((check or Verification)(request, runs), runs)
    finally:
        if request.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return replace(certificate, seconds=round(time.monotonic() - begun, 1))


def _certified(check: Check, runs: Runs) -> Certificate:
    try:
        return check.certify()
    except ServerDied as error:
        return runs.certificate(reasons=[str(error)])
    except (MemoryError, RuntimeError, OSError) as error:
        reason = refusals.of_memory(error)
        if not reason:
            raise
        return runs.certificate(reasons=[reason])


class Verification:
    """Compares one script on one number of ranks with one process.

    Args:
        request: what is asked for.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs
        self.comparison = Comparison()
        self.samples = SampleFindings()
        self.nature: list[str] = []
        self.splits_model = False

    # -- the verdict

    def certify(self) -> Certificate:
        """The certificate."""
        ranks = self.runs.on_ranks()
        if refusals.is_of_types(ranks):
            self.runs.float64 = False
            ranks = self.runs.on_ranks()
        apart = refusals.deadlock(ranks)
        if apart is not None:
            return self._different(ranks, *apart)
        reason = refusals.of_ranks(ranks, self.request.steps)
        if reason:
            return self._unknown(reason)
        if ranks.has("join"):
            ranks = ranks.joined()
        self.splits_model = _splits_model(ranks)
        self.samples = Samples(ranks, self.splits_model).look()
        self.nature += self.samples.notes
        if self.samples.differences:
            reason = refusals.cut_twice(ranks)
            return self._unknown(reason) if reason else self._different(ranks, *self.samples.differences[0])
        return self._against_one(ranks)

    def _against_one(self, ranks: Recording) -> Certificate:
        """Run one process, and compare the ranks with it."""
        whole = self.runs.on_one(ranks, order=(0,) if self.splits_model else ())
        reason = refusals.of_one(whole)
        if reason:
            return self._unknown(reason)
        first = _windows(whole)[:1]  # none where closures step: they make the backwards themselves
        if first and first == [size * self.request.devices for size in _windows(ranks)[:1]]:
            # the script accumulates by the number of ranks: one process gets the micro-batches one after another
            self.runs.apart = True
            whole = self.runs.on_one(ranks)
        expected, windows = _windows(ranks, self.request.devices if self.runs.apart else 1), _windows(whole)
        if any(a != b for a, b in zip(expected, windows, strict=False)):
            return self._unknown(
                f"one process would have to make steps of {expected} backwards, and it makes ones of {windows}: "
                "let the micro-batches of a step not depend on the number of ranks, or divide by it"
            )
        self.comparison = self._compare(ranks, whole)
        if not ranks.has("batch"):
            if self.comparison.first is not None:
                return self._unknown(refusals.NO_LOADER)
            self.nature.append("the data come from no DataLoader: what one process chose are the ranks' samples")
        self.nature += notes_of(ranks, whole)
        return self._judge(ranks, whole)

    def _judge(self, ranks: Recording, whole: Recording) -> Certificate:
        self._forgive(ranks, whole)
        short = refusals.short_window(ranks) or refusals.left_out(ranks)
        first = self.comparison.first
        if short is not None and (first is None or short[0].update <= first.update):
            return self._different(ranks, *short)
        if first is not None:
            late_calls = lambda update: self.runs.on_ranks(f"{LATE} {update}")  # noqa: E731
            cause = Causes(first, ranks, whole, self._alike_without, self.splits_model, late_calls).find()
            alone = AloneFinding(cause=cause)
            if cause is None and first.what == GRADIENTS:
                alone = RanksAlone(ranks, whole, self.runs).look()
            if alone.unknown:
                return self._unknown(alone.unknown)
            if not alone.nature:
                return self._different(ranks, first, alone.cause)
            self.nature.append(alone.nature)
            self.comparison.forget(GRADIENTS, CLIPPED, PARAMETERS, BUFFERS)
            if self.comparison.first is not None:
                return self._different(ranks, self.comparison.first, None)
        padded = self.samples.padded
        if padded:
            found = evaluation.counted_twice(ranks, whole, padded, self.runs)
            if found is not None:
                return self._different(ranks, *found)
            self.nature.append(f"{padded[0]}: no printed number shows it")
        return self._alike(ranks)

    def _alike(self, ranks: Recording) -> Certificate:
        reasons = [*self.samples.vacuous, *self.comparison.vacuous]
        steps = _made(ranks)
        if 1 < steps < self.request.steps:
            self.nature.append(f"the script made {steps} of {self.request.steps} optimizer steps: these were compared")
        elif steps < self.request.steps:
            reasons.append(
                f"the script made {steps} of {self.request.steps} optimizer steps: ask for fewer by --steps {steps}, "
                "or let it train longer"
            )
        if not self.comparison.vacuous:
            reasons += self._untrained()
        return self._certificate(ranks, reasons=reasons)

    def _untrained(self) -> list[str]:
        """Say of which parameters nothing is known; a reason where they are a large part of the model."""
        untouched, zero = self.comparison.untouched, self.comparison.zero
        if self.comparison.zero_share > _UNTOUCHED:
            return [
                f"no gradient, or one that is rounding beside the largest, reaches {self.comparison.zero_share:.0%} of "
                f"the parameters ({_some(untouched + zero)}): let the optimizer have those alone that are trained, or "
                "ask for more --steps"
            ]
        if untouched:
            self.nature.append(f"no gradient reaches {_some(untouched)}: nothing is known of it")
        if zero:
            self.nature.append(
                f"the gradient of {_some(zero)} is zero, or rounding beside the largest, in all steps: nothing is "
                "known of it"
            )
        return []

    def _different(self, ranks: Recording, difference: Difference, cause: Reason | None) -> Certificate:
        if difference not in self.comparison.differences:
            self.comparison.differences.append(difference)
        return self._certificate(ranks, found=(difference, cause))

    def _unknown(self, reason: str) -> Certificate:
        return self.runs.certificate(reasons=[reason])

    def _certificate(
        self, ranks: Recording, found: tuple[Difference, Reason | None] | None = None, reasons: Sequence[str] = ()
    ) -> Certificate:
        comparison = self.comparison
        comparison.count(SAMPLES, self.samples.compared)
        return self.runs.certificate(_made(ranks), comparison.rows(), found, reasons, self.nature, comparison.course)

    # -- comparing

    def _compare(self, ranks: Recording, whole: Recording) -> Comparison:
        comparison = Numbers(ranks, whole, exactly).compare()
        first = comparison.first
        float64 = self.runs.float64
        if first is None or (float64 and not first.size < _CERTAIN):
            return comparison
        backwards = tuple(reversed(range(self.request.devices)))
        other = self.runs.on_one(ranks, order=backwards)
        spread = Numbers(other, whole, _anyhow).compare().sizes
        rounding = _within(spread, EXACT if float64 else _OWN_PRECISION)
        return Numbers(ranks, whole, rounding, 1e-7 if float64 else 1e-3).compare()

    def _alike_without(self, override: str) -> bool:
        """Whether the two runs are alike where something is switched off."""
        ranks = self.runs.on_ranks(override)
        if refusals.of_ranks(ranks, 1):
            return False
        if override.startswith("once"):
            whole = self.runs.on_one(ranks, override, order=(0,))
            found = Numbers(ranks, whole, exactly).compare().differences
            return not any(each.what == GRADIENTS and each.update == 0 for each in found)
        whole = self.runs.on_one(ranks, override)
        if refusals.of_one(whole):
            return False
        return self._compare(ranks, whole).first is None

    def _forgive(self, ranks: Recording, whole: Recording) -> None:
        """Take out what differs by nature: the end of a join, rates that follow the number of ranks."""
        self._forgive_join(ranks)
        first = self.comparison.first
        if first is None or first.what != RATES or first.ranks or _schedules(ranks) != _schedules(whole):
            return
        told = self.runs.on_one(ranks, "world size")
        if [each["rates"] for each in told.first.steps] == [each["rates"] for each in ranks.first.steps]:
            self.comparison.forget(RATES)
            self.nature.append("the learning rate follows the number of ranks; one process was given theirs")

    def _forgive_join(self, ranks: Recording) -> None:
        """Take out the steps at which gradients are divided by all ranks, and some have no data."""
        uneven = ranks.uneven_from
        if uneven is None or not any(event["by_all"] for _, event in ranks.of("join")):
            return
        if uneven == 0:
            self.comparison.vacuous.append("a rank has no data in the first step within Join: give each some")
        elif self.comparison.forget_from(uneven):
            self.nature.append(
                f"Join: ranks without data count as zeros, so that step {uneven} and those after it are smaller"
            )


def _steps(rank: RankRecording) -> int:
    """The steps of the optimizer that made most, as the user counts them."""
    return max((event["number"] + 1 for event in rank.steps), default=0)


def _made(ranks: Recording) -> int:
    """The steps that ranks made; within Join those of the rank that made most."""
    counts = [_steps(rank) for rank in ranks.ranks]
    return max(counts) if ranks.has("join") else min(counts)


def _schedules(recording: Recording) -> list[int]:
    """How often schedulers were stepped before each update."""
    rank = recording.first
    return [len(rank.of("scheduled", update=event["update"])) for event in rank.steps]


def _windows(recording: Recording, times: int = 1) -> list[int]:
    """The backwards of each step."""
    return [event["backwards"] * times for event in recording.first.steps if not event["closure"]]


def _splits_model(ranks: Recording) -> bool:
    """Whether ranks hold parts of a model: DTensors of no data parallelism, or parameters that differ in shape."""
    if ranks.has("sharded data parallel"):
        return False
    if ranks.is_sharded or ranks.has("tensor parallel"):
        return True
    if ranks.has("wrapped") or not any(event["in_module"] for _, event in ranks.of("collective")):
        return False
    return not are_alike([rank.load("first", 0) for rank in ranks.ranks])


def _anyhow(what: str, update: int) -> float:
    """A tolerance that all passes, to see how large differences are."""
    return math.inf


def _within(spread: dict[tuple[str, int], float], least: float) -> Tolerance:
    """A tolerance of several times what rounding makes, by kind and update."""

    def tolerance(what: str, update: int) -> float:
        return max(least, _SPREAD * spread.get((what, update), 0.0))

    return tolerance


def _some(names: list[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
