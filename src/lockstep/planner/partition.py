"""The exact split of a chain of blocks over devices in a row: the slowest device takes the least possible time.

    split = partition([Block(seconds=1.0), Block(seconds=2.0)], [Device(), Device()])
    split.bottleneck

**Algorithm.** Chains-on-chains partitioning by dynamic programming (Pinar and Aykanat 2004 for equal processors and
2008 for unequal ones): with F[d, j] the least bottleneck of the first j blocks on the first d devices,
F[d, j] = min over i of max(F[d - 1, i], cost of blocks i to j on device d). Which blocks of a stage are computed again
so that it fits is a knapsack, solved by branch and bound (Horowitz and Sahni 1974). The dynamic program begins with a
lower bound of each stage's knapsack. The stages of its solution are then solved exactly and take the place of their
bounds, until a solution has exact stages only: it is optimal, since all others cost at least their bounds. The
recomputation of a stage of dozens of different blocks is the best of those tried: see `TRIES` and `PEAKS`.

**Assumed.** Devices stand in the order given, and one may be left empty, unless each shall have a block. A block's time
on a device is its time divided by the device's speed. A stage sends and receives one after another and beside its
computation: the activation and its gradient, over its own link. A device holds the activations of `Device.in_flight`
micro-batches at a time; a block that is computed again keeps its inputs for each, and all of its activations for one,
while its backward runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

CLOSE = 1e-9
"""Solutions that differ by less, relative to their seconds, count as equal."""
TRIES = 50_000
"""Choices that the knapsacks of a stage try; then the best so far counts. A dozen different blocks need fewer."""
PEAKS = 64
"""Of a stage, the peaks by blocks that are computed again, each of which is a knapsack of its own."""
CLASSES = 24
"""Classes of blocks that a lower bound tells apart: more make it closer and slower."""

# -- what is split, and over what ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block of a chain; times on a device of speed 1, both for one micro-batch.

    Attributes:
        seconds: forward and backward.
        again: what a recomputation takes: another forward. Infinite: the block is never computed again.
        states: bytes that stay for the whole step: parameters, gradients, optimizer states.
        kept: bytes that the forward keeps for the backward.
        inputs: of them, those that are kept all the same when the block is computed again.
        working: bytes that are needed beside these while the block runs.
        sends: bytes of the output; its gradient has as many.
    """

    seconds: float
    again: float = math.inf
    states: float = 0.0
    kept: float = 0.0
    inputs: float = 0.0
    working: float = 0.0
    sends: float = 0.0

    @property
    def saves(self) -> float:
        """Bytes of a micro-batch that a recomputation spares; 0 where there is none."""
        return max(self.kept - self.inputs, 0.0) if self.again < math.inf else 0.0


@dataclass(frozen=True)
class Device:
    """A device of the row.

    Attributes:
        speed: relative to the one on which the blocks were measured.
        memory: bytes that it has for blocks.
        bandwidth: bytes a second of its link.
        latency: seconds of a message.
        in_flight: micro-batches whose activations it holds at the same time; gradients may count as parts of one.
    """

    speed: float = 1.0
    memory: float = math.inf
    bandwidth: float = math.inf
    latency: float = 0.0
    in_flight: float = 1


@dataclass(frozen=True)
class Stage:
    """The blocks of one device.

    Attributes:
        device: its place in the row.
        start, stop: its blocks, ``blocks[start:stop]``.
        recomputed: the indices of those that are computed again.
        seconds: of a micro-batch: computation, recomputation and messages.
        memory: bytes.
    """

    device: int
    start: int
    stop: int
    recomputed: tuple[int, ...]
    seconds: float
    memory: float


@dataclass(frozen=True)
class Split:
    """A chain over devices; devices without blocks have no stage."""

    stages: tuple[Stage, ...]

    @property
    def bottleneck(self) -> float:
        """Seconds of the slowest stage, for one micro-batch."""
        return max((stage.seconds for stage in self.stages), default=0.0)


class DoesNotFit(ValueError):
    """A chain needs more memory than its devices have.

    Attributes:
        missing: bytes; with so many more on each device a split can be found.
    """

    def __init__(self, message: str, missing: float) -> None:
        super().__init__(message)
        self.missing = missing


# -- one stage ---------------------------------------------------------------------------------------------------


class _Tries:
    """How many choices the knapsacks of a stage have tried so far."""

    def __init__(self) -> None:
        self.count = 0


class _Taken(NamedTuple):
    """How many of each kind a knapsack has taken so far, the last kind first."""

    before: _Taken | None = None
    number: int = 0

    def counts(self) -> list[int]:
        found, here = [], self
        while here.before is not None:
            found.append(here.number)
            here = here.before
        return found[::-1]


def cheapest(
    costs: Sequence[float],
    sizes: Sequence[float],
    need: float,
    below: float = math.inf,
    tries: _Tries | None = None,
) -> tuple[int, ...] | None:
    """The indices of least total cost whose sizes make up ``need`` at least; None where all are too few.

    Args:
        costs: not negative.
        sizes: positive, one for each cost.
        need: what they must add up to.
        below: give None, too, where the least total cost is not below this.
        tries: counted over several calls; after `TRIES` the best so far is given.

    Example:
        >>> cheapest([3.0, 2.0, 2.0], [4.0, 2.0, 2.0], 4.0)
        (0,)
    """
    kinds = Counter(zip(costs, sizes, strict=True))
    order = sorted(kinds, key=lambda kind: (kind[0] / kind[1], -kind[1]))
    spends, sums = [0.0], [0.0]  # costs and sizes of all kinds before one
    for cost, size in order:
        spends.append(spends[-1] + cost * kinds[cost, size])
        sums.append(sums[-1] + size * kinds[cost, size])
    if sums[-1] < need:
        return None
    found: _Taken | None = None
    waiting: list[tuple[int, float, float, _Taken]] = [(0, 0.0, need, _Taken())]
    tries = _Tries() if tries is None else tries
    while waiting and (tries.count < TRIES or below == math.inf):
        tries.count += 1
        at, spent, missing, taken = waiting.pop()
        if missing <= 0:
            if spent < below:
                below, found = spent, taken
            continue
        reach = sums[at] + missing
        if sums[-1] < reach * (1 - 1e-15):
            continue
        full = min(bisect_left(sums, reach, at), len(order)) - 1  # the kind of which a part would do
        bound = spent + spends[full] - spends[at] + (reach - sums[full]) * order[full][0] / order[full][1]
        if bound < below * (1 - CLOSE):
            cost, size = order[at]
            most = min(kinds[order[at]], math.ceil(missing / size))
            waiting += [(at + 1, spent + n * cost, missing - n * size, _Taken(taken, n)) for n in range(most + 1)]
    if found is None:
        return None
    picks = dict(zip(order, found.counts(), strict=False))
    chosen = []
    for index, kind in enumerate(zip(costs, sizes, strict=True)):
        if picks.get(kind, 0) > 0:
            picks[kind] -= 1
            chosen.append(index)
    return tuple(chosen)


def memory_of(blocks: Sequence[Block], device: Device, recomputed: frozenset[int] = frozenset()) -> float:
    """Bytes that ``blocks`` need on a device when those of the indices ``recomputed`` are computed again."""
    stays = sum(block.states for block in blocks)
    kept = sum(block.kept - (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    peaks = (block.working + (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    return stays + device.in_flight * kept + max(peaks, default=0.0)


def _peaks(blocks: Sequence[Block]) -> list[float]:
    """Bytes that backwards may need where blocks are computed again: `PEAKS` values to try, with the largest."""
    least = max(block.working for block in blocks)
    peaks = sorted({max(block.working + block.saves, least) for block in blocks if block.saves})
    step = -(-len(peaks) // PEAKS) or 1
    return peaks[::-step][::-1]


def choose(blocks: Sequence[Block], device: Device) -> frozenset[int] | None:
    """Which of ``blocks`` to compute again so that they fit a device, in the least time; None where nothing helps."""
    if memory_of(blocks, device) <= device.memory:
        return frozenset()
    fixed = sum(block.states + device.in_flight * block.kept for block in blocks)
    least_seconds, best = math.inf, None
    tries = _Tries()
    for peak in _peaks(blocks):
        able = [at for at, block in enumerate(blocks) if block.saves and block.working + block.saves <= peak]
        sizes = [device.in_flight * blocks[at].saves for at in able]
        costs = [blocks[at].again for at in able]
        taken = cheapest(costs, sizes, fixed + peak - device.memory, least_seconds, tries)
        if taken is None:
            continue
        chosen = frozenset(able[at] for at in taken)
        seconds = sum(blocks[at].again for at in chosen)
        if memory_of(blocks, device, chosen) <= device.memory * (1 + 1e-12) and seconds < least_seconds:
            least_seconds, best = seconds, chosen
    return best


def stage_of(blocks: Sequence[Block], device: Device, at: int, start: int, stop: int) -> Stage | None:
    """``blocks[start:stop]`` on a device, with the best choice of what is computed again; None: they do not fit.

    Args:
        blocks: the whole chain.
        device: where.
        at: the device's place in the row.
        start, stop: the stage.
    """
    mine = blocks[start:stop]
    chosen = choose(mine, device)
    if chosen is None:
        return None
    seconds = sum(b.seconds for b in mine) + sum(mine[index].again for index in chosen)
    ends = [end for end in (start, stop) if 0 < end < len(blocks)]
    messages = sum(2 * (device.latency + blocks[end - 1].sends / device.bandwidth) for end in ends)
    again = tuple(sorted(start + index for index in chosen))
    return Stage(at, start, stop, again, seconds / device.speed + messages, memory_of(mine, device, chosen))


# -- all of them -------------------------------------------------------------------------------------------------


class _Chain:
    """What the dynamic program knows of all stages ``[start:stop]`` at once: matrices ``[stop, start]``."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks, self.size = blocks, len(blocks)
        ends = [block.sends for block in blocks]
        self.sends = torch.tensor([0.0, *ends[:-1], 0.0], dtype=torch.float64)
        self.inner = torch.tensor([0.0, *[1.0] * (self.size - 1), 0.0], dtype=torch.float64)
        self.seconds = self._total([block.seconds for block in blocks])
        self.states = self._total([block.states for block in blocks])
        self.kept = self._total([block.kept for block in blocks])
        self.saves = self._total([block.saves for block in blocks])
        self.empty = torch.arange(self.size + 1)[:, None] == torch.arange(self.size + 1)
        self.backward = torch.arange(self.size + 1)[:, None] < torch.arange(self.size + 1)
        self.recomputes = any(block.saves for block in blocks)

    @staticmethod
    def _total(values: list[float]) -> Tensor:
        return torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)

    def _most(self, values: list[float]) -> Tensor:
        """The largest of each stage."""
        row = torch.tensor(values, dtype=torch.float64)
        grid = torch.full((self.size + 1, self.size + 1), -math.inf, dtype=torch.float64)
        below = torch.arange(self.size)[:, None] >= torch.arange(self.size)
        grid[1:, :-1] = torch.where(below, row[:, None], -math.inf)
        return grid.cummax(0).values

    @cached_property
    def working(self) -> Tensor:
        return self._most([block.working for block in self.blocks])

    @cached_property
    def least_peak(self) -> Tensor:
        """The least that a stage needs beside what it keeps when any of its blocks is computed again."""
        return -self._most([-(b.working + b.saves) if b.saves else -math.inf for b in self.blocks])

    @cached_property
    def most_saved(self) -> Tensor:
        return self._most([block.saves for block in self.blocks])

    @cached_property
    def least_again(self) -> Tensor:
        return -self._most([-block.again if block.saves else -math.inf for block in self.blocks])

    @cached_property
    def classes(self) -> list[tuple[float, Tensor]]:
        """Blocks by the seconds that a byte saved costs, cheapest first: the least of a class, and its bytes so far."""
        able = sorted((block.again / block.saves, at) for at, block in enumerate(self.blocks) if block.saves)
        kinds = sorted({ratio for ratio, _ in able})
        step = max(1, -(-len(kinds) // CLASSES))
        found = []
        for first in range(0, len(kinds), step):
            members = {at for ratio, at in able if kinds[first] <= ratio <= kinds[min(first + step, len(kinds)) - 1]}
            saved = [block.saves if at in members else 0.0 for at, block in enumerate(self.blocks)]
            found.append((kinds[first], self._total(saved)))
        return found

    def bounds(self, device: Device, spare: bool = True) -> Tensor:
        """A lower bound of the seconds of each stage on a device; infinite where it cannot fit.

        Args:
            device: on which.
            spare: whether it may stay without blocks.
        """
        cost = (self.seconds[:, None] - self.seconds) / device.speed
        link = 2 * (device.latency * self.inner + self.sends / device.bandwidth)
        cost += link[:, None]
        cost += link
        cost.masked_fill_(self.backward, math.inf)
        if device.memory < math.inf:
            stays = self.states + device.in_flight * self.kept
            need = (stays[:, None] - stays).add_(self.working)
            over = need > device.memory
            over &= ~self.backward
            cost.masked_fill_(over, math.inf)
            if self.recomputes:
                over &= need - device.memory <= device.in_flight * (self.saves[:, None] - self.saves)
                stop, start = over.nonzero(as_tuple=True)
                peak = torch.maximum(self.working[stop, start], self.least_peak[stop, start])
                missing = stays[stop] - stays[start] + peak - device.memory
                again = self._again(device, start, stop, missing)
                sent = link[stop] + link[start]
                cost[stop, start] = (self.seconds[stop] - self.seconds[start] + again) / device.speed + sent
        return cost.masked_fill_(self.empty, 0.0 if spare else math.inf)

    def _again(self, device: Device, start: Tensor, stop: Tensor, missing: Tensor) -> Tensor:
        """The least seconds in which recomputation can save ``missing`` bytes, if it takes parts of blocks, too."""
        each = device.in_flight * self.most_saved[stop, start]
        fewest = (missing * (1 - 1e-12) / each).ceil_().mul_(self.least_again[stop, start])
        left, seconds = missing * (1 - 1e-12) / device.in_flight, torch.zeros_like(missing)
        for ratio, saved in self.classes:
            part = torch.minimum(left, saved[stop] - saved[start])
            seconds.add_(part, alpha=ratio)
            left -= part
        return torch.maximum(fewest, seconds).masked_fill_(left > 1e-9 * missing, math.inf)


Exact = dict[tuple[int, int], Stage | None]
"""The stages of a device by start and stop; None: it does not fit."""


class _Program:
    """The dynamic program, over bounds of stages and over what is known exactly of some.

    Attributes:
        exact: stages that were solved.
        width: no stage with more blocks can be part of a better solution.
    """

    def __init__(self, blocks: Sequence[Block], devices: Sequence[Device], spare: bool) -> None:
        self.chain, self.devices, self._spare = _Chain(blocks), devices, spare
        self.exact: dict[int, Exact] = {at: {} for at in range(len(devices))}
        self.width = len(blocks)
        self._bands: dict[Device, Tensor] = {}

    def _costs(self, device: Device) -> Tensor:
        """A band: by stop and by start, which is ``stop - width`` in the first column and ``stop`` in the last."""
        found = self._bands.get(device)
        if found is None:
            start = torch.arange(self.chain.size + 1)[:, None] + torch.arange(-self.width, 1)
            found = (
                self.chain.bounds(device, self._spare).gather(1, start.clamp(min=0)).masked_fill_(start < 0, math.inf)
            )
            if self.width < self.chain.size or len(self._bands) < 8:  # whole ones of a thousand blocks have 8 MB each
                self._bands[device] = found
        return found

    def _row(self, at: int, stop: int, costs: Tensor) -> Tensor:
        row = costs[stop].clone()
        for (start, end), stage in self.exact[at].items():
            if end == stop and stop - start <= self.width:
                row[start - stop - 1] = math.inf if stage is None else stage.seconds
        return row

    def solve(self) -> tuple[float, list[tuple[int, int, int]]]:
        """The least bottleneck, and device, start and stop of the stages that have blocks; infinite: there is none."""
        reached = torch.full((self.width + self.chain.size + 1,), math.inf, dtype=torch.float64)
        reached[self.width] = 0.0
        rows = [reached.unfold(0, self.width + 1, 1)]
        for at, device in enumerate(self.devices):
            costs = self._costs(device)
            here = torch.maximum(costs, rows[-1]).amin(1)
            for stop in {stop for _, stop in self.exact[at]}:
                here[stop] = torch.maximum(self._row(at, stop, costs), rows[-1][stop]).amin()
            padded = torch.full_like(reached, math.inf)
            padded[self.width :] = here
            rows.append(padded.unfold(0, self.width + 1, 1))
        path, stop = list[tuple[int, int, int]](), self.chain.size
        if not math.isfinite(bottleneck := float(rows[-1][-1][-1])):
            return bottleneck, path
        for at in range(len(self.devices) - 1, -1, -1):
            best = torch.maximum(self._row(at, stop, self._costs(self.devices[at])), rows[at][stop]).argmin()
            start = stop - self.width + int(best)
            path.append((at, start, stop))
            stop = start
        return bottleneck, [key for key in path[::-1] if key[1] < key[2]]

    def narrow(self, seconds: float) -> None:
        """A solution of so many seconds is known: leave out stages that are slower."""
        widest = 0
        for device in set(self.devices):
            stop, column = (self._costs(device) <= seconds).nonzero(as_tuple=True)
            widest = max(widest, int((self.width - column).max()) if len(stop) else 0)
        if 2 * widest <= self.width:
            self._bands = {device: band[:, self.width - widest :].clone() for device, band in self._bands.items()}
            self.width = widest


def partition(blocks: Sequence[Block], devices: Sequence[Device], spare: bool = True) -> Split:
    """Split a chain over devices so that the slowest stage takes the least time; see the head of this file.

    Args:
        blocks: in the order in which they run.
        devices: in the order in which they get them.
        spare: a device may stay without blocks; else each gets one at least.

    Raises:
        DoesNotFit: no split fits, with what is missing.
        ValueError: there is no block or no device, or too few blocks for all devices.

    Example:
        >>> chain = [Block(seconds=1.0), Block(seconds=1.0), Block(seconds=4.0)]
        >>> [(s.start, s.stop) for s in partition(chain, [Device(), Device(speed=2.0)]).stages]
        [(0, 2), (2, 3)]
    """
    if not blocks or not devices:
        raise ValueError(f"partition: {len(blocks)} blocks over {len(devices)} devices: give one of each at least")
    if not spare and len(blocks) < len(devices):
        raise ValueError(f"partition: {len(blocks)} blocks cannot be on each of {len(devices)} devices: give fewer")
    program = _Program(blocks, devices, spare)
    while True:
        bound, path = program.solve()
        if not math.isfinite(bound):
            raise _too_large(blocks, devices, spare)
        new = [(at, start, stop) for at, start, stop in path if (start, stop) not in program.exact[at]]
        for at, start, stop in new:
            program.exact[at][start, stop] = stage_of(blocks, devices[at], at, start, stop)
        stages = [stage for at, *ends in path if (stage := program.exact[at][ends[0], ends[1]]) is not None]
        split = Split(tuple(stages))
        if len(stages) == len(path):
            if not new or split.bottleneck <= bound * (1 + CLOSE):
                return split
            program.narrow(split.bottleneck)


def _too_large(blocks: Sequence[Block], devices: Sequence[Device], spare: bool) -> DoesNotFit:
    """Which block is larger than any device, or what all of them lack."""
    missing = _missing(blocks, devices, spare)
    for index, block in enumerate(blocks):
        gaps = []
        for device in devices:
            needs = [memory_of([block], device, chosen) for chosen in (frozenset[int](), frozenset({0}))]
            gaps.append(min(needs) - device.memory)
        if min(gaps) > 0:
            return DoesNotFit(
                f"block {index} alone needs {min(gaps):.0f} bytes more than any device has: make the micro-batch "
                "smaller, or split the block",
                max(missing, min(gaps)),
            )
    return DoesNotFit(
        f"{len(blocks)} blocks do not fit {len(devices)} devices in a row: each would need {missing:.0f} bytes more. "
        "Give more devices, a smaller micro-batch, or fewer micro-batches at the same time",
        missing,
    )


def _missing(blocks: Sequence[Block], devices: Sequence[Device], spare: bool) -> float:
    """With so many bytes more on each device a split is found."""
    chain = _Chain(blocks)
    reached = torch.full((chain.size + 1,), math.inf, dtype=torch.float64)
    reached[0] = -math.inf
    for device in devices:
        stays = chain.states + device.in_flight * chain.kept
        need = stays[:, None] - stays + chain.working
        if chain.recomputes:
            again = stays - device.in_flight * chain.saves
            peak = chain._most([block.working + block.saves for block in blocks])
            need = torch.minimum(need, again[:, None] - again + peak)
        need = (need - device.memory).masked_fill_(chain.backward, math.inf)
        need.masked_fill_(chain.empty, -math.inf if spare else math.inf)
        reached = torch.maximum(need, reached).amin(1)
    return float(reached[-1])
