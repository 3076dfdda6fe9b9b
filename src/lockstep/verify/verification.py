"""Runs a script on N ranks and as one process, compares the two, and gives the certificate."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.verify import mixed_precision, refusals
from lockstep.verify.alone import AloneFinding, RanksAlone
from lockstep.verify.causes import Causes, Reason
from lockstep.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row
from lockstep.verify.compare import (
    BUFFERS,
    CLIPPED,
    EXACT,
    GRADIENTS,
    IN_ORDER,
    PARAMETERS,
    RATES,
    SAMPLES,
    STEPS,
    Comparison,
    Difference,
    Numbers,
    Tolerance,
    exactly,
)
from lockstep.verify.processes import Patience, Server, run
from lockstep.verify.recordings import RankRecording, Recording
from lockstep.verify.samples import SampleFindings, Samples
from lockstep.verify.settings import Settings
from lockstep.verify.working_copy import working_copy

_SPREAD = 30.0
"""How many times the spread of rounding passes."""
_OWN_PRECISION = 1e-5
"""The least that passes where a script calculates in its own precision."""
_CERTAIN = 1e-5
"""A difference above it is no rounding of float64, and one below it is compared with the spread of rounding."""
_UNTOUCHED = 0.1
"""The part of a model's elements that may get no gradient."""


@dataclass(frozen=True)
class Request:
    """What is to be verified.

    Attributes:
        words: the script and its arguments, or ``-m`` and a module with its.
        devices: ranks.
        steps: optimizer steps.
        strategy: what Trainers take on several ranks in place of their own; "" for their own.
        patience: how long a run may take.
        keep: a folder for the recordings; None: they go.
    """

    words: tuple[str, ...]
    devices: int = 2
    steps: int = 5
    strategy: str = ""
    patience: Patience = field(default_factory=Patience)
    keep: Path | None = None


@dataclass
class Found:
    """What is known so far.

    Attributes:
        differences: with their causes, where those are known already.
        nature: what differs by nature.
        reasons: why it cannot be told.
    """

    differences: list[tuple[Difference, Reason | None]] = field(default_factory=list)
    nature: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def verify(
    request: Request,
    certify: Callable[[Verification], Certificate] | None = None,
    server: Server | None = None,
) -> Certificate:
    """Run, compare, and certify.

    Args:
        request: what is asked for.
        certify: gives the certificate; by default ranks are compared with one process.
        server: starts processes; None: one that ends behind it.
    """
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-")) if request.keep is None else request.keep.resolve()
    try:
        with Server() if server is None else nullcontext(server) as starts:
            verification = Verification(request, folder, starts)
            certificate = verification.certify() if certify is None else certify(verification)
    finally:
        if request.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return replace(certificate, seconds=round(time.monotonic() - begun, 1))


class Verification:
    """One script on one number of ranks.

    Args:
        request: what is asked for.
        folder: where recordings go.
        server: starts processes.
    """

    def __init__(self, request: Request, folder: Path, server: Server) -> None:
        self.request = request
        self.server = server
        self.folder = folder
        self.float64 = True
        self.apart = False
        self.found = Found()
        self._runs = 0

    # -- runs

    def _run(self, name: str, settings: Settings, left_by: Path | None = None, together: int = 0) -> Recording:
        self._runs += 1
        folder = self.folder / f"{self._runs}-{name}"
        settings = replace(settings, folder=str(folder))
        working_copy(left_by or Path.cwd(), settings.working_folder)
        endings = run(self.server, settings, self.request.patience, together)
        ranks = [replace(settings, rank=rank) for rank in range(settings.world)]
        pairs = zip(ranks, endings, strict=True)
        return Recording(tuple(RankRecording(each.own_folder, ending) for each, ending in pairs))

    def on_ranks(self, *overrides: str) -> Recording:
        """Run the script on all ranks."""
        return self._run("ranks", replace(self._settings(), world=self.request.devices, overrides=overrides))

    def on_ranks_cut(
        self, steps: int, cut: int, epochs: int = 0, left_by: Path | None = None, interrupt: int = 0
    ) -> Recording:
        """Run the script on all ranks, with epochs that end early, in the folder that another run has left."""
        settings = replace(self._settings(), world=self.request.devices, steps=steps, cut=cut, epochs=epochs)
        settings = replace(settings, interrupt=interrupt)
        return self._run("ranks", settings, left_by)

    def on_simulated(self, world: int, steps: int) -> Recording:
        """Run the script on ranks that have no others to talk to, a few at a time."""
        settings = replace(self._settings(), world=world, steps=steps, simulated=True)
        return self._run("simulated", settings, together=os.cpu_count() or 1)

    def on_one(self, ranks: Recording, *overrides: str, order: tuple[int, ...] = ()) -> Recording:
        """Run the script as one process, which is fed what the ranks were."""
        feed = tuple(str(ranks.ranks[rank].folder) for rank in order or range(self.request.devices))
        return self._run("one", replace(self._settings(), feed=feed, overrides=overrides))

    def _settings(self) -> Settings:
        home = str(Path.cwd())
        request = self.request
        return Settings(
            request.words,
            "",
            steps=request.steps,
            float64=self.float64,
            apart=self.apart,
            strategy=request.strategy,
            home=home,
        )

    # -- the verdict

    def certify(self) -> Certificate:
        """The certificate."""
        ranks = self.on_ranks()
        if refusals.is_of_types(ranks):
            self.float64 = False
            ranks = self.on_ranks()
        apart = refusals.deadlock(ranks)
        if apart is not None:
            return self._different(ranks, Comparison(), SampleFindings(), *apart)
        reason = refusals.of_ranks(ranks, self.request.steps)
        if reason:
            return self._unknown(reason)
        samples = Samples(ranks, self._splits_model(ranks)).look()
        self.found.reasons += samples.vacuous
        self.found.nature += samples.notes
        if samples.differences:
            difference, text = samples.differences[0]
            return self._different(ranks, Comparison(), samples, difference, Reason(text))
        return self._against_one(ranks, samples)

    def _against_one(self, ranks: Recording, samples: SampleFindings) -> Certificate:
        """Run one process, and compare the ranks with it."""
        whole = self.on_one(ranks, order=(0,) if self._splits_model(ranks) else ())
        reason = refusals.of_one(whole)
        if reason:
            return self._unknown(reason)
        first = self._windows(whole)[:1]  # none where closures step: they make the backwards themselves
        if first and first == [size * self.request.devices for size in self._windows(ranks)[:1]]:
            # the script accumulates by the number of ranks: one process gets the micro-batches one after another
            self.apart = True
            whole = self.on_one(ranks)
        expected, windows = self._windows(ranks, self.request.devices if self.apart else 1), self._windows(whole)
        if any(a != b for a, b in zip(expected, windows, strict=False)):
            return self._unknown(
                f"one process would have to make steps of {expected} backwards, and it makes ones of {windows}: "
                "let the micro-batches of a step not depend on the number of ranks, or divide by it"
            )
        comparison = self._compare(ranks, whole)
        if not ranks.has("batch"):
            if comparison.first is not None:
                return self._unknown(refusals.NO_LOADER)
            self.found.nature.append("the data come from no DataLoader: what one process chose are the ranks' samples")
        self._note_nature(ranks, whole)
        return self._judge(ranks, whole, comparison, samples)

    def _judge(
        self, ranks: Recording, whole: Recording, comparison: Comparison, samples: SampleFindings
    ) -> Certificate:
        self._forgive(ranks, whole, comparison)
        short = refusals.short_window(ranks) or refusals.left_out(ranks)
        first = comparison.first
        if short is not None and (first is None or short[0].update <= first.update):
            return self._different(ranks, comparison, samples, *short)
        if first is not None:
            cause = Causes(ranks, whole, self._alike_without, self._splits_model(ranks)).of(first)
            alone = RanksAlone(ranks, self).look() if cause is None and first.what == GRADIENTS else AloneFinding()
            if not alone.nature:
                return self._different(ranks, comparison, samples, first, cause or alone.cause)
            self.found.nature.append(alone.nature)
            comparison.forget(GRADIENTS, CLIPPED, PARAMETERS, BUFFERS)
            if comparison.first is not None:
                return self._different(ranks, comparison, samples, comparison.first, None)
        for difference, text in self._evaluation(ranks, whole, samples):
            return self._different(ranks, comparison, samples, difference, Reason(text))
        return self._alike(ranks, comparison, samples)

    def _alike(self, ranks: Recording, comparison: Comparison, samples: SampleFindings) -> Certificate:
        reasons = [*self.found.reasons, *comparison.vacuous]
        counts = [self._steps(rank) for rank in ranks.ranks]
        steps = max(counts) if ranks.has("join") else min(counts)
        if steps < self.request.steps:
            reasons.append(
                f"the script made {steps} of {self.request.steps} optimizer steps: ask for fewer by --steps {steps}, "
                "or let it train longer"
            )
        reasons += self._untrained(comparison)
        return self._certificate(ranks, UNKNOWN if reasons else ALIKE, comparison, samples, reasons=tuple(reasons))

    def _untrained(self, comparison: Comparison) -> list[str]:
        """Say of which parameters nothing is known; a reason where they are a large part of the model."""
        untouched, zero = comparison.untouched, comparison.zero
        if comparison.zero_share > _UNTOUCHED and not comparison.vacuous:
            return [f"no gradient reaches {comparison.zero_share:.0%} of the parameters: {_some(untouched + zero)}"]
        if untouched and not comparison.vacuous:
            self.found.nature.append(f"no gradient reaches {_some(untouched)}: nothing is known of it")
        if zero and not comparison.vacuous:
            self.found.nature.append(f"the gradient of {_some(zero)} is zero in all steps: nothing is known of it")
        return []

    def _different(
        self,
        ranks: Recording,
        comparison: Comparison,
        samples: SampleFindings,
        difference: Difference,
        cause: Reason | None,
    ) -> Certificate:
        if difference not in comparison.differences:
            comparison.differences.append(difference)
        certificate = self._certificate(ranks, DIFFERENT, comparison, samples)
        return replace(
            certificate, first=str(difference), cause=str(cause or ""), proof=cause.proof if cause is not None else ""
        )

    def _unknown(self, reason: str) -> Certificate:
        return Certificate(self._script(), self.request.devices, 0, UNKNOWN, reasons=(reason,))

    def _certificate(
        self,
        ranks: Recording,
        verdict: str,
        comparison: Comparison,
        samples: SampleFindings,
        reasons: tuple[str, ...] = (),
    ) -> Certificate:
        return Certificate(
            self._script(),
            self.request.devices,
            min(self._steps(rank) for rank in ranks.ranks),
            verdict,
            "float64" if self.float64 else "own",
            tuple(_rows(comparison, samples)),
            reasons=reasons,
            nature=tuple(dict.fromkeys(self.found.nature)),
            course=tuple(comparison.course),
        )

    def _script(self) -> str:
        return " ".join(self.request.words)

    def _steps(self, rank: RankRecording) -> int:
        """The steps of the optimizer that made most, as the user counts them."""
        return max((event["number"] + 1 for event in rank.steps), default=0)

    # -- comparing

    def _compare(self, ranks: Recording, whole: Recording) -> Comparison:
        comparison = Numbers(ranks, whole, exactly).compare()
        first = comparison.first
        if first is None or (self.float64 and not first.size < _CERTAIN):
            return comparison
        backwards = tuple(reversed(range(self.request.devices)))
        other = self.on_one(ranks, order=backwards)
        spread = Numbers(other, whole, _anyhow).compare().sizes
        rounding = _within(spread, EXACT if self.float64 else _OWN_PRECISION)
        return Numbers(ranks, whole, rounding, 1e-7 if self.float64 else 1e-3).compare()

    def _alike_without(self, override: str) -> bool:
        """Whether the two runs are alike where something is switched off."""
        ranks = self.on_ranks(override)
        if refusals.of_ranks(ranks, 1):
            return False
        if override.startswith("once"):
            whole = self.on_one(ranks, override, order=(0,))
            found = Numbers(ranks, whole, exactly).compare().differences
            return not any(each.what == GRADIENTS and each.update == 0 for each in found)
        whole = self.on_one(ranks, override)
        if refusals.of_one(whole):
            return False
        return self._compare(ranks, whole).first is None

    def _forgive(self, ranks: Recording, whole: Recording, comparison: Comparison) -> None:
        """Take out what differs by nature: the end of a join, rates that follow the number of ranks."""
        if ranks.has("join"):
            self._forgive_join(ranks, comparison)
        first = comparison.first
        if first is not None and first.what == RATES and not first.ranks:
            told = self.on_one(ranks, "world size")
            if self._schedules(ranks) != self._schedules(whole):
                return
            if [each["rates"] for each in told.first.steps] == [each["rates"] for each in ranks.first.steps]:
                comparison.differences = [each for each in comparison.differences if each.what != RATES]
                self.found.nature.append("the learning rate follows the number of ranks; one process was given theirs")

    def _forgive_join(self, ranks: Recording, comparison: Comparison) -> None:
        end = min(len(rank.steps) for rank in ranks.ranks)
        late = [each for each in comparison.differences if each.update >= end]
        if late:
            comparison.differences = [each for each in comparison.differences if each not in late]
            self.found.nature.append(
                "Join: ranks without data count as zeros, so that the steps behind their end are smaller"
            )

    def _schedules(self, recording: Recording) -> list[int]:
        """How often schedulers were stepped before each update."""
        scheduled = [event["update"] for event in recording.first.of("scheduled")]
        return [scheduled.count(event["update"]) for event in recording.first.steps]

    def _windows(self, recording: Recording, times: int = 1) -> list[int]:
        """The backwards of each step."""
        return [event["backwards"] * times for event in recording.first.steps if not event["closure"]]

    def _splits_model(self, ranks: Recording) -> bool:
        """Whether ranks hold parts of a model: DTensors of no data parallelism, or parameters that differ in shape."""
        if ranks.has("sharded data parallel"):
            return False
        if ranks.is_sharded or ranks.has("tensor parallel"):
            return True
        first = [rank.load("first", 0) for rank in ranks.ranks]
        wrapped = ranks.has("wrapped")
        return not wrapped and ranks.has("collective") and _differ(first) and _in_forward(ranks)

    def _note_nature(self, ranks: Recording, whole: Recording) -> None:
        if ranks.has("dropout"):
            self.found.nature.append("dropout was off: ranks drop other elements than one process does")
        if ranks.has(mixed_precision.NOTE):
            name = ranks.first.of(mixed_precision.NOTE)[0]["name"]
            self.found.nature.append(f"{name} was off: it rounds parameters or gradients to a smaller type")
        if ranks.has("comm hook"):
            name = ranks.first.of("comm hook")[0]["name"]
            self.found.nature.append(f"the communication hook {name} was off: it rounds gradients, or keeps parts back")
        if whole.has("batch norm"):
            self.found.nature.append(
                "BatchNorm is not synchronized: one process was made to count over each rank's samples, as ranks do"
            )
        if ranks.has("draw") and whole.has("draw") is False:
            self.found.nature.append("random numbers of a step: one process was given those of the ranks")
        for _, event in whole.of("own draw", "rank 0's draw"):
            self.found.nature.append(f"random numbers of {event['where']} could not be handed to one process")

    def _evaluation(
        self, ranks: Recording, whole: Recording, samples: SampleFindings
    ) -> Iterator[tuple[Difference, str]]:
        """Samples that are counted twice in what is printed behind an evaluation."""
        looked = Samples(ranks, False)
        looked.found = samples
        found = list(looked.padding())
        if not found:
            return
        numbers = tuple(number for number, _, _ in samples.padded)
        feed = tuple(str(rank.folder) for rank in ranks.ranks)
        once = self._run("one", replace(self._settings(), feed=feed, once=numbers))
        wrong = _counts_twice(ranks.first.printed, whole.first.printed, once.first.printed)
        if wrong:
            difference, cause = found[0]
            yield replace(difference, text=f"{difference.text}, and counts in {wrong!r}"), cause
        else:
            self.found.nature.append(f"{found[0][0].text}: no printed number shows it")


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


def _counts_twice(theirs: list[str], own: list[str], once: list[str]) -> str:
    """A printed line with a number that ranks and one process share, and that is another one where each sample counts
    once; "" for none."""
    for lines in zip(theirs, own, once, strict=False):
        words = [_NUMBER.findall(line) for line in lines]
        if len({_NUMBER.sub("", line) for line in lines}) > 1:
            continue
        for mine, whole, right in zip(*words, strict=True):
            if mine == whole != right:
                return lines[0].strip()
    return ""


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def _differ(tensors: list[dict[str, object]]) -> bool:
    import torch

    first = tensors[0]
    for other in tensors[1:]:
        for key, value in first.items():
            theirs = other.get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(theirs, torch.Tensor):
                continue
            if value.shape != theirs.shape or not torch.equal(value, theirs):
                return True
    return False


def _in_forward(ranks: Recording) -> bool:
    """Whether collectives run while a model is called."""
    return any(event.get("in_module") for _, event in ranks.of("collective"))


def _rows(comparison: Comparison, samples: SampleFindings) -> Iterator[Row]:
    first = comparison.first
    if samples.compared:
        bad = first is not None and first.what == SAMPLES
        yield Row(SAMPLES, f"{samples.compared} batches", f"DIFFERENT: {first}" if bad else "each once")
    for what in IN_ORDER:
        count = comparison.compared.get(what)
        if not count:
            continue
        of_kind = [each for each in comparison.differences if each.what == what]
        if of_kind:
            outcome = f"DIFFERENT: {min(of_kind, key=lambda each: (each.update, -each.size))}"
        elif what in comparison.largest:
            outcome = f"alike to {max(comparison.largest[what], 1e-17):.0e}"
        else:
            outcome = "alike"
        yield Row(what, f"{count}{' steps' if what in (RATES, STEPS) else ''}", outcome)
