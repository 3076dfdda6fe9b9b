"""The parts of `scripts/gpu` in their order, and what the process of each is told. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PartPlan:
    """A part: the file `benchmarks/gpu/parts/NAME.py`.

    Attributes:
        name: of the part and its file.
        title: what it looks at.
        seconds: its limit, where the whole run has 585.
        beside: whether it may run while others do: it looks at numbers, bits, counts and ends, and measures no time
            but with limits that leave room.
    """

    name: str
    title: str
    seconds: float
    beside: bool = False


PARTS: tuple[PartPlan, ...] = (
    PartPlan("suite", "the tests marked gpu", 45, beside=True),
    PartPlan("fits", "fits in every precision, resumed to the same bits", 60, beside=True),
    PartPlan("waits", "places where a step waits for the device", 40, beside=True),
    PartPlan("one_card", "two ranks on one device, compared with one process", 70, beside=True),
    PartPlan("collectives", "reducer, hooks, objects and shards over NCCL", 45, beside=True),
    PartPlan("fine_tune", "pretrained weights, adapters, matrix optimizers, compiled layers", 80, beside=True),
    PartPlan("life", "start and end of ranks, failures and hangs", 150, beside=True),
    PartPlan("speed", "steps compared with a hand-written loop, torch's DDP, Lightning, Accelerate", 205),
    PartPlan("large", "steps of 1.2 billion parameters, compiled, whole and in shards", 150),
    PartPlan("steps", "steps while a checkpoint is written, and in float8", 60),
    PartPlan("memory", "peak memory, memory left after a fit, predictions of a plan", 45),
    PartPlan("kernels", "SyncBatchNorm, copies to the host", 25),
    PartPlan("several", "equality, scaling and late ranks on several devices", 120),
)
"""In the order in which they run: the most valuable first."""
WHOLE = 585.0
"""Seconds that the limits above are made for, on one device and with `CORES`."""
CORES = 8
"""With so many, parts that measure no time run side by side."""


def chosen(names: str) -> list[PartPlan]:
    """The parts of a list with commas between them, in their own order; all for an empty one.

    Raises:
        ValueError: for a name that no part has.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"--parts {names}: no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in PARTS if not wanted or part.name in wanted]


def rounds(parts: Sequence[PartPlan], cores: int) -> list[list[PartPlan]]:
    """Parts that run at once, in their order: each alone, or with neighbours that measure no time either."""
    found: list[list[PartPlan]] = []
    for part in parts:
        joins = cores >= CORES and part.beside and bool(found) and found[-1][0].beside
        if joins:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def limit_of(part: PartPlan, later: Sequence[PartPlan], left: float) -> float:
    """Seconds for a part: its own limit, longer where there is time to spare, shorter where there is less left.

    Args:
        part: the one that is to begin.
        later: those behind it.
        left: seconds of the whole run.
    """
    planned = part.seconds + sum(each.seconds for each in later)
    return min(left, part.seconds * max(1.0, left / planned))
