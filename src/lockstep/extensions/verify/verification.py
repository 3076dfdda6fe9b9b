"""Verification of a script, which runs it on N ranks and as one process, and compares the two runs."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lockstep.extensions.verify import refusals, samples
from lockstep.extensions.verify.alone import AloneFinding, RanksAlone
from lockstep.extensions.verify.causes import Causes, own_metric
from lockstep.extensions.verify.certificate import Certificate, Row
from lockstep.extensions.verify.compare import (
    BUFFERS,
    CLIPPED,
    EXACT,
    FIRST,
    GRADIENTS,
    PARAMETERS,
    RATES,
    SAMPLES,
    STEPS,
    Comparison,
    Difference,
    Numbers,
    Reason,
    are_equal,
    exact,
    shorten,
)
from lockstep.extensions.verify.functions import KEPT, SAME
from lockstep.extensions.verify.imports import MIXED_PRECISION
from lockstep.extensions.verify.own_batches import JOINED, ORDERS, OWN_CUTS
from lockstep.extensions.verify.processes import Server, ServerDied
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.reports import Reports
from lockstep.extensions.verify.runs import Request, Runs

_SPREAD = 30.0
"""Factor by which a difference may exceed the spread that rounding causes."""
_OWN_PRECISION = 1e-5
"""Smallest tolerance for a script that computes in its own precision."""
CERTAIN = 1e-5
"""Differences in float64 above this are not rounding; smaller ones are compared with the spread of rounding."""
_MAX_UNTRAINED = 0.1
"""Largest fraction of a model's elements that may get no gradient."""

_NOTES_OF_RANKS = {
    "dropout": "dropout was disabled: ranks drop different elements than one process",
    MIXED_PRECISION: "{name} was disabled: it rounds parameters or gradients to a smaller dtype",
    "comm hook": "the communication hook {name} was disabled: it rounds gradients or delays parts of them",
}
_NOTES_OF_SINGLE = {
    "batch norm": "BatchNorm is not synchronized ({wrapped}): one process computed the statistics of each rank",
    JOINED: "one process used the batches of all ranks, joined, at {where}",
    ORDERS: "the ranks draw different permutations at {where}: several ranks may get the same sample",
    SAME: "all ranks draw the same random numbers for different samples at {where}; one process would not",
    **dict.fromkeys(KEPT, "the ranks' random numbers at {where} could not be reproduced in one process"),
}


class Check(Protocol):
    """Interface of a check that runs a script and returns a certificate."""

    def certify(self) -> Certificate:
        """Run the script and return the certificate."""


def verify(
    request: Request, check: Callable[[Request, Runs], Check] | None = None, server: Server | None = None
) -> Certificate:
    """Run a script, compare its runs, and return the certificate.

    Args:
        request: what to verify.
        check: kind of check; None: `Verification`, which compares ranks with one process.
        server: starts processes; None: a new one, which ends afterwards.
    """
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-")) if request.keep is None else request.keep.resolve()
    try:
        with Server() if server is None else nullcontext(server) as used:
            runs = Runs(request, folder, used)
            try:
                certificate = (check or Verification)(request, runs).certify()
            except ServerDied as error:
                certificate = runs.certificate(reasons=[str(error)])
    finally:
        if request.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return replace(certificate, seconds=round(time.monotonic() - start, 1))


class Verification:
    """Check that compares a script's run on N ranks with its run in one process.

    Args:
        request: what to verify.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs
        self.comparison = Comparison()
        self.samples = samples.SampleFindings()
        self.notes: list[str] = []
        self.reported: list[Row] = []
        self.splits_model = False

    # -- the verdict

    def certify(self) -> Certificate:
        """Run the script and return the certificate."""
        ranks = self.runs.on_ranks()
        if refusals.is_type_error(ranks):
            self.runs.float64 = False
            ranks = self.runs.on_ranks()
        # first, since ranks that wait for each other have failed or are stuck as well
        deadlock = refusals.deadlock(ranks)
        if deadlock is not None:
            return self._certify_different(ranks, *deadlock)
        if reason := refusals.check_ranks(ranks):
            return self._certify_unknown(reason)
        if ranks.has("join") and ranks.uneven_from is not None:
            self.notes.append(
                f"Join: from step {ranks.uneven_from} on some ranks have no data, so that only the steps before are "
                "compared"
            )
            ranks = ranks.until(ranks.uneven_from)
        self.splits_model = _splits_model(ranks)
        self.samples = samples.Samples(ranks, self.splits_model).check()
        self.notes += self.samples.notes
        if self.samples.differences:
            if reason := refusals.check_mesh(ranks):
                return self._certify_unknown(reason)
            return self._certify_different(ranks, *self.samples.differences[0])
        return self._against_one(ranks)

    def _against_one(self, ranks: Recording) -> Certificate:
        """Run the script in one process, compare the run on N ranks with that run, and return a certificate."""
        own_cuts, order = ([OWN_CUTS], (0,)) if self.splits_model else ([], ())
        single = self.runs.on_one(ranks, *own_cuts, order=order)
        if reason := refusals.check_single(single):
            return self._certify_unknown(reason)
        first = _windows(single)[:1]  # empty if closures step: they make the backwards themselves
        if first and first == [size * self.request.devices for size in _windows(ranks)[:1]]:
            # the script accumulates by the number of ranks: one process gets the micro-batches one after another
            self.runs.rank_by_rank = True
            single = self.runs.on_one(ranks)
        times = self.request.devices if self.runs.rank_by_rank else 1
        expected, windows = [size * times for size in _windows(ranks)], _windows(single)
        if any(a != b for a, b in zip(expected, windows, strict=False)):
            return self._certify_unknown(
                f"one process runs {windows} backwards in its steps, but should run {expected}: choose a number of "
                "micro-batches per step that does not depend on the number of ranks, or divide it by that number"
            )
        self.comparison = self._compare(ranks, single)
        if not ranks.has_loader and not single.has(JOINED) and self.comparison.first is None:
            self.notes.append(
                "the data do not come from a DataLoader, but one process chose the same samples as the ranks"
            )
        if ranks.reduced_in_step and GRADIENTS not in self.comparison.compared:
            self.notes.append("the optimizer reduces gradients in its step: only the parameters after it are compared")
        self.notes += _notes_of(ranks, single)
        return self._judge(ranks, single)

    def _judge(self, ranks: Recording, single: Recording) -> Certificate:
        self._drop_expected(ranks, single)
        known = refusals.unsynchronized_shards(ranks) or own_metric(ranks) or samples.split_twice(ranks, single)
        known = known or refusals.own_choices(ranks, single, self.samples.shares_inputs and not self.splits_model)
        first = self.comparison.first
        if known is not None and (first is None or known[0].update <= first.update):
            return self._certify_different(ranks, *known)
        if first is not None and first.kind == FIRST and (reason := refusals.check_parts(ranks, single)):
            return self._certify_unknown(reason)
        if first is not None:
            causes = Causes(first, ranks, single, self.runs, self.splits_model)
            is_certain = ranks.has_loader or causes.ranks_disagree
            is_known = is_certain or causes.is_joined
            alone = AloneFinding(cause=causes.find(), unknown=causes.unknown) if is_known else AloneFinding()
            has_samples = ranks.has_loader or single.has(JOINED)
            if alone == AloneFinding() and first.kind == GRADIENTS and has_samples:
                alone = RanksAlone(ranks, single, self.runs).check()
            # one process that has the samples of one rank, and computes its gradients, proves that it was fed
            is_found = is_certain or alone.nature or (is_known and alone.cause)
            if reason := alone.unknown or ("" if is_found else refusals.without_loader(single)):
                return self._certify_unknown(reason)
            if not alone.nature:
                return self._certify_different(ranks, first, alone.cause)
            self.notes.append(alone.nature)
            # all that follows from the gradients
            self.comparison.drop(GRADIENTS, CLIPPED, PARAMETERS, BUFFERS)
            if self.comparison.first is not None:
                return self._certify_different(ranks, self.comparison.first, None)
        reports = Reports(ranks, single, self.samples, self.runs)
        # other parameters, or parts of a model, give other numbers
        is_comparable = first is None and not self.splits_model
        found = reports.badly_reduced() if is_comparable else None
        if self.samples.padded and found is None:
            found = reports.counted_twice()
            self.notes += [] if found else [f"{self.samples.padded[0]}: no printed number shows it"]
        if is_comparable and found is None:
            self.notes += filter(None, [reports.local()])
        self.reported = reports.rows(found[0] if found else None)
        return self._certify_different(ranks, *found) if found else self._certify_alike(ranks)

    def _certify_alike(self, ranks: Recording) -> Certificate:
        """Return a certificate that the runs agree, or one with the reasons why their agreement is not conclusive."""
        reasons = [*self.samples.vacuous, *self.comparison.vacuous]
        steps = _steps_of(ranks)
        if 1 < steps < self.request.steps:
            self.notes.append(f"the script made {steps} of {self.request.steps} optimizer steps, which were compared")
        elif steps < self.request.steps:
            reasons.append(
                f"the script made {steps} of {self.request.steps} optimizer steps: request fewer with --steps {steps}, "
                "or let it train longer"
            )
        if not self.comparison.vacuous:
            untrained = shorten(self.comparison.untrained)
            if self.comparison.untrained_share > _MAX_UNTRAINED:
                reasons.append(
                    f"{self.comparison.untrained_share:.0%} of the parameters ({untrained}) get no gradient above "
                    "rounding: pass only parameters that are trained to the optimizer, or request more --steps"
                )
            elif untrained:
                self.notes.append(f"no gradient above rounding reaches {untrained} in any step: not verified")
        return self._certificate(ranks, reasons=reasons)

    def _certify_different(self, ranks: Recording, difference: Difference, cause: Reason | None) -> Certificate:
        # the rows of the table show it as well
        if difference not in self.comparison.differences:
            self.comparison.differences.append(difference)
        return self._certificate(ranks, found=(difference, cause))

    def _certify_unknown(self, reason: str) -> Certificate:
        return self.runs.certificate(reasons=[reason])

    def _certificate(
        self, ranks: Recording, found: tuple[Difference, Reason | None] | None = None, reasons: Sequence[str] = ()
    ) -> Certificate:
        comparison = self.comparison
        comparison.count(SAMPLES, self.samples.compared)
        steps = _steps_of(ranks)
        rows = [*comparison.rows(), *self.reported]
        return self.runs.certificate(steps, rows, found, reasons, self.notes, comparison.course)

    # -- comparing

    def _compare(self, ranks: Recording, single: Recording) -> Comparison:
        """Compare the runs exactly. After small differences, compare with tolerances measured by reordering samples."""
        comparison = Numbers(ranks, single, exact).compare()
        first = comparison.first
        float64 = self.runs.float64
        if first is None or (float64 and not first.size < CERTAIN):
            return comparison
        # the same samples in another order: all that differs is rounding
        backwards = tuple(reversed(range(self.request.devices)))
        other = self.runs.on_one(ranks, order=backwards)
        spread = Numbers(other, single, lambda kind, update: math.inf).compare().sizes
        least = EXACT if float64 else _OWN_PRECISION

        def tolerance(kind: str, update: int) -> float:
            return max(least, _SPREAD * spread.get((kind, update), 0.0))

        return Numbers(ranks, single, tolerance, 1e-7 if float64 else 1e-3).compare()

    def _drop_expected(self, ranks: Recording, single: Recording) -> None:
        """Drop expected differences: the number of steps of one process, and rates that depend on the ranks' number."""
        steps = ranks.fewest_steps
        if not ranks.has_loader and all(len(rank.steps) == steps < len(single.first.steps) for rank in ranks.ranks):
            # one process may cut more batches from the data than a rank from its share
            self.comparison.drop(STEPS)
        first = self.comparison.first
        if first is None or first.kind != RATES or first.ranks:
            return
        # how often schedulers are stepped must not depend on the ranks
        schedules = [
            [len(run.first.find("scheduled", update=event["update"])) for event in run.first.steps]
            for run in (ranks, single)
        ]
        if schedules[0] != schedules[1]:
            return
        with_size = self.runs.on_one(ranks, "world size")
        if [each["rates"] for each in with_size.first.steps] == [each["rates"] for each in ranks.first.steps]:
            self.comparison.drop(RATES)
            where = ranks.first.line_of("added")
            text = f"the learning rate depends on the number of ranks ({where}); one process used the ranks' rates"
            self.notes.append(text)


def _steps_of(ranks: Recording) -> int:
    """Return the number of steps that all ranks made, of the optimizer with the most."""
    return min(max((event["number"] + 1 for event in rank.steps), default=0) for rank in ranks.ranks)


def _windows(recording: Recording) -> list[int]:
    """Return a list with the number of backwards in each step."""
    return [event["backwards"] for event in recording.first.steps if not event["closure"]]


def _splits_model(ranks: Recording) -> bool:
    """Return True if tensor parallelism (by DTensors or by hand) splits the model. FSDP does not count."""
    if ranks.has("sharded data parallel"):
        return False
    if ranks.is_sharded or ranks.has("tensor parallel"):
        return True
    # tensor parallelism by hand calls collectives within modules
    if ranks.has("wrapped") or not any(event["in_module"] for _, event in ranks.find("collective")):
        return False
    return not are_equal([rank.load("first", 0) for rank in ranks.ranks])


def _notes_of(ranks: Recording, single: Recording) -> Iterator[str]:
    """Yield notes on features disabled in the runs, and on reuse of the ranks' random numbers in the single process."""
    for run, texts in ((ranks, _NOTES_OF_RANKS), (single, _NOTES_OF_SINGLE)):
        for _, event in run.find(*texts):
            yield texts[event["kind"]].format(**event, wrapped=ranks.first.line_of("wrapped") or event.get("where"))
    if ranks.has("draw"):
        yield "one process used the ranks' random numbers in each step"
