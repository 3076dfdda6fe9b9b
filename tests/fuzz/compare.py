"""What ranks show of a program beside what one process shows of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.utilities.exceptions import MisconfigurationException
from tests.fuzz.program import Program, Shown, alone, run
from tests.tools.pool import RankFailure, RankPool, RankTimeout

TOLERANCE = 1e-9
NAMED = re.compile(r"rank|parameter '|static_graph")
"""What an error has to name, to be a refusal and not a crash."""


@dataclass(frozen=True)
class Verdict:
    """How a program did.

    Attributes:
        outcome: "equal"; "refused", by an error with a reason; "impossible": one process refuses it, too; or
            "different".
        reasons: the error's message, or the differences.
    """

    program: Any
    outcome: str
    reasons: tuple[str, ...] = ()


def compare(pool: RankPool, program: Program, timeout: float = 60) -> Verdict:
    """Run a program on one process and on its ranks."""
    try:
        expected = pool.run(run, alone(program), world=1, group=False, timeout=timeout)[0]
    except RankFailure as error:
        return Verdict(program, "impossible", (_reason(error),))
    try:
        ranks = pool.run(run, program, world=program.world, group=False, timeout=timeout)
    except (RankTimeout, RankFailure) as error:
        return failed(program, error)
    found = differences(expected, ranks)
    return Verdict(program, "different" if found else "equal", tuple(found))


def failed(program: Any, error: RankTimeout | RankFailure) -> Verdict:
    """The verdict on a program whose ranks ended in an error."""
    if isinstance(error, RankTimeout):
        return Verdict(program, "different", (f"no end: {error}",))
    named = isinstance(error.__cause__, MisconfigurationException) or NAMED.search(_reason(error)) is not None
    return Verdict(program, "refused" if named else "different", (_reason(error),))


def _reason(error: RankFailure) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None else str(error)


def differences(expected: Shown, ranks: list[Shown]) -> list[str]:
    """Where the ranks show something else than one process, one sentence each."""
    found = []
    places = sorted({place for shown in [expected, *ranks] for place in shown.seen})
    for place in places:
        mine, theirs = (
            Counter(expected.seen.get(place, ())),
            Counter(i for shown in ranks for i in shown.seen.get(place, ())),
        )
        if mine != theirs:
            found.append(
                f"{place}: samples lost {sorted((mine - theirs).elements())}, "
                f"counted too often {sorted((theirs - mine).elements())}"
            )
    for rank, shown in enumerate(ranks):
        for what in ("parameters", "buffers"):
            if what == "buffers" and rank:
                continue  # after a fit rank 0's count
            found += _tensors(what, rank, getattr(expected, what), getattr(shown, what))
        for what in ("metrics", "totals", "rates"):
            mine, theirs = getattr(expected, what), getattr(shown, what)
            if not _close(mine, theirs):
                found.append(f"{what} on rank {rank}: {_unlike(mine, theirs)}")
    if not _close(expected.rows, ranks[0].rows):
        pairs = zip(expected.rows, ranks[0].rows, strict=False)
        first = next(((a, b) for a, b in pairs if not _close(a, b)), None)
        told = f"{first[0]}, not {first[1]}" if first else f"{len(expected.rows)} rows, not {len(ranks[0].rows)}"
        found.append(f"the logger should get {told}")
    return found


def _tensors(what: str, rank: int, expected: dict[str, Tensor], shown: dict[str, Tensor]) -> list[str]:
    if expected.keys() != shown.keys():
        return [f"{what} on rank {rank}: {sorted(shown)}, not {sorted(expected)}"]
    scale = max([1e-3, *(float(value.abs().max()) for value in expected.values() if value.numel())])
    found = []
    for name, value in expected.items():
        size = float((value - shown[name]).abs().max()) if value.shape == shown[name].shape else math.inf
        if not size <= TOLERANCE * scale and not (torch.isnan(value) == torch.isnan(shown[name])).all().logical_and(
            torch.isnan(value).all()
        ):
            found.append(f"{what} on rank {rank}: {name!r} is off by {size:.3g}")
    return found


def _close(mine: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    if isinstance(mine, dict):
        # torchmetrics adds up in float32, whatever the precision of the run
        bounds = {key: 1e-5 if key == "metric" else TOLERANCE for key in mine}
        return mine.keys() == theirs.keys() and all(_close(mine[key], theirs[key], bounds[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs))
    if mine is None or theirs is None:
        return mine is theirs
    if math.isnan(mine) or math.isnan(theirs):
        return math.isnan(mine) and math.isnan(theirs)
    return math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance)


def _unlike(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict):
        names = [name for name in {**mine, **theirs} if not _close(mine.get(name), theirs.get(name))]
        return ", ".join(f"{name!r} is {theirs.get(name)}, not {mine.get(name)}" for name in names)
    return f"{theirs}, not {mine}"
