"""The verdict on two runs that should be one: what strays first, on which ranks, and what that is a sign of."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

STEPS = "course of steps"
BUFFER = "buffer"
INITIAL = "first parameter"
GRADIENT = "gradient"
CLIPPED = "clipped gradient"
PARAMETER = "parameter"
_IN_ORDER = (STEPS, INITIAL, BUFFER, GRADIENT, CLIPPED, PARAMETER)
"""Kinds, as they come in a step: what strays later in a step follows from what strayed before."""

_SHOWN = 8
"""Lines of a report for the differences of one step."""


@dataclass(frozen=True)
class Difference:
    """What strays at one step.

    Attributes:
        step: the optimizer step, counted from 0.
        what: "first parameter" (those that training starts from), "buffer" (with which the step's forward
            runs), "gradient" (before clipping), "clipped gradient", "parameter" (after the step), or
            "course of steps" (the runs made different ones).
        name: of the parameter or buffer; "" for a course of steps.
        ranks: those on which it strays.
        size: largest absolute difference; infinite where there is no gradient in one of the runs only.
        scale: largest element that one process has, over all names; a difference is measured by it.
    """

    step: int
    what: str
    name: str
    ranks: tuple[int, ...]
    size: float
    scale: float

    def __str__(self) -> str:
        where = f"on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if self.what == STEPS:
            return f"step {self.step}: another {STEPS} {where}"
        if math.isinf(self.size):
            return f"step {self.step}: {self.what} {self.name!r} {where} is there in one of the runs only"
        return f"step {self.step}: {self.what} {self.name!r} {where} off by {self.size:.3g} (largest: {self.scale:.3g})"


@dataclass(frozen=True)
class EquivalenceReport:
    """What `check_equivalence` found; true where nothing strays.

    Attributes:
        title: what was compared with one process.
        steps: optimizer steps.
        differences: by step and kind as they came, in each the largest first.
        cause: what the first of them are a sign of; "" where there are none.
        largest: the largest difference that passed, as part of its scale.
        traffic: by step, the reductions of gradients that a rank took part in, and the bytes that it gave to them;
            of the rank that sent most.
    """

    title: str
    steps: int
    differences: tuple[Difference, ...] = ()
    cause: str = ""
    largest: float = 0.0
    traffic: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def first(self) -> tuple[Difference, ...]:
        """The differences of the step and kind that stray first; all others may follow from them."""
        start = self.differences[:1]
        return tuple(d for d in self.differences if (d.step, d.what) == (start[0].step, start[0].what))

    def __str__(self) -> str:
        if self:
            return f"{self.title}: {self.steps} steps as on one process, to {self.largest:.1e}"
        lines = [f"{self.title}: strays from one process.", *map(str, self.first[:_SHOWN])]
        if len(self.first) > _SHOWN:
            lines.append(f"and {len(self.first) - _SHOWN} more of this step")
        return "\n  ".join([*lines, f"Cause: {self.cause}."])


# -- what ranks say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One difference, as one rank sees it; ``digest`` tells whether two ranks hold the same wrong tensor."""

    step: int
    what: str
    name: str
    size: float
    scale: float
    digest: str


@dataclass
class Witness:
    """What one rank has to say about its run."""

    findings: list[Finding] = field(default_factory=list)
    largest: float = 0.0
    clipped_before: set[int] = field(default_factory=set)
    """Steps whose gradient lay within the bound of clipping already, though that of one process does not."""
    weights: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By step, the samples of each forward; 0 for one that a rank has none of."""
    buffers: dict[int, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By step, for each forward, the digests of the buffers that it started with."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By digest, the buffers."""
    traffic: list[tuple[int, int]] = field(default_factory=list)
    """After each step, the reductions of gradients so far, and their bytes."""

    def forward(self, step: int, weight: float, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Note with what a forward starts."""
        seen = {}
        for name, buffer in buffers:
            found = buffer.detach().cpu()
            seen[name] = digest(found)
            if seen[name] not in self.tensors:
                self.tensors[seen[name]] = found.clone()
        self.weights[step].append(weight)
        self.buffers[step].append(seen)


def digest(tensor: Tensor | None) -> str:
    """A fingerprint of a CPU tensor's bits."""
    if tensor is None:
        return ""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(bits, digest_size=16).hexdigest()


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(title: str, steps: int, ranks: list[Witness]) -> EquivalenceReport:
    """The report on what all ranks say, by rank."""
    by_place: dict[tuple[int, str, str], dict[int, Finding]] = defaultdict(dict)
    for rank, witness in enumerate(ranks):
        for finding in witness.findings:
            by_place[finding.step, finding.what, finding.name][rank] = finding
    differences = [
        Difference(*place, tuple(found), max(f.size for f in found.values()), next(iter(found.values())).scale)
        for place, found in by_place.items()
    ]
    differences += _stale_buffers(ranks)
    differences.sort(key=lambda d: (d.step, _IN_ORDER.index(d.what), -d.size))
    largest = max((witness.largest for witness in ranks), default=0.0)
    report = EquivalenceReport(title, steps, tuple(differences), largest=largest, traffic=_traffic(ranks))
    return report if report else replace(report, cause=_cause(report.first, ranks))


def _traffic(ranks: list[Witness]) -> tuple[tuple[int, int], ...]:
    """What each step cost, from what each rank's counters showed after it."""
    after = [(0, 0), *(max(each) for each in zip(*(witness.traffic for witness in ranks), strict=False))]
    return tuple((number - before, size - less) for (before, less), (number, size) in pairwise(after))


def _stale_buffers(ranks: list[Witness]) -> list[Difference]:
    """Buffers in which the ranks never were one in a step; between a window's forwards they may part."""
    found = []
    for step, forwards in ranks[0].buffers.items():
        for name in forwards[0] if forwards else ():
            digests = [[seen[name] for seen in witness.buffers.get(step, [])] for witness in ranks]
            # a rank without samples runs no forward
            if any(len(set(alike)) == 1 for alike in zip(*filter(None, digests), strict=False)):
                continue
            mine, newest = digests[0][-1], [each[-1] if each else "" for each in digests]
            strays = tuple(rank for rank, theirs in enumerate(newest) if theirs and theirs != mine)
            tensors = [ranks[rank].tensors[newest[rank]].double() for rank in (0, *strays) if newest[rank]]
            size = max(((each - tensors[0]).abs().max().item() for each in tensors), default=math.inf)
            found.append(Difference(step, BUFFER, name, strays, size, tensors[0].abs().max().item()))
    return found


def _cause(first: tuple[Difference, ...], ranks: list[Witness]) -> str:
    """What the differences that came first are a sign of."""
    step, what = first[0].step, first[0].what
    if what == STEPS:
        return "the runs make different steps: their data does not end alike, or an update is left out"
    if what == INITIAL:
        return "training does not start from rank 0's parameters"
    if what == BUFFER:
        return "stale buffers: the ranks' forwards run with buffers of their own, rank 0's are not taken over"
    if what == PARAMETER:
        return "the update itself: the gradients are right, the parameters after the step are not"
    if not _alike_on_all(first, ranks):
        if what == CLIPPED:
            return "clipping on each rank by another norm: the gradients are right and alike before it"
        names = ", ".join(repr(d.name) for d in first[:_SHOWN])
        return f"not reduced: the ranks hold different gradients of {names} (a bucket is left out?)"
    if what == CLIPPED:
        return "clipping: the gradients are right before it, and on all ranks alike wrong after it"
    if any(step in witness.clipped_before for witness in ranks):
        return "clipping before the reduction: a gradient that exceeds the bound lies within it before it is clipped"
    samples = [witness.weights.get(step, []) for witness in ranks]
    told = "; ".join(f"rank {rank}: {', '.join(f'{n:g}' for n in each)}" for rank, each in enumerate(samples))
    if len({n for each in samples for n in each}) > 1:
        return f"mean of means: the first step to stray is shared out unevenly, and weighed evenly (samples: {told})"
    return f"weights: the ranks agree on a wrong gradient in an even step (samples: {told}); one's loss weighs too much"


def _alike_on_all(first: tuple[Difference, ...], ranks: list[Witness]) -> bool:
    step, what = first[0].step, first[0].what
    digests: dict[str, set[str]] = defaultdict(set)
    for witness in ranks:
        mine = {
            finding.name: finding.digest for finding in witness.findings if (finding.step, finding.what) == (step, what)
        }
        for difference in first:
            digests[difference.name].add(mine.get(difference.name, "within the tolerance"))
    return all(len(each) == 1 for each in digests.values())
