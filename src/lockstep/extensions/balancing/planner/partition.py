"""The split of a chain of blocks over devices in a row: the slowest device takes the least possible time.

    split = partition([Block(seconds=1.0), Block(seconds=2.0)], [Device(), Device()])
    split.bottleneck

**Algorithm.** Chains-on-chains partitioning by dynamic programming (Pinar and Aykanat 2004 for equal processors and
2008 for unequal ones): with F[d, j] the least bottleneck of the first j blocks on the first d devices,
F[d, j] = min over i of max(F[d - 1, i], cost of blocks i to j on device d). It is exact where no block is computed
again. In a stage that is too large, blocks are computed again greedily, those first that cost the fewest seconds a
byte, until it fits (`_Chain.chosen`): the least of all choices is a knapsack for each stage.

**Assumed.** Devices stand in the order given, and one may be left empty, unless each shall have a block. A block's time
on a device is its time divided by the device's speed. A stage sends and receives one after another and beside its
computation: the activation and its gradient, over its own link. A device holds the activations of `Device.in_flight`
micro-batches at a time; a block that is computed again keeps its inputs for each, and all of its activations for one,
while its backward runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MATRICES = 8
"""Devices whose stages' seconds are kept: those of a thousand blocks have 8 MB each."""
ROUNDING = 1 + 1e-12
"""What adds up to so much of a device's memory fits into it."""

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


# -- its stages ----------------------------------------------------------------------------------------------------


def memory_of(blocks: Sequence[Block], device: Device, recomputed: frozenset[int] = frozenset()) -> float:
    """Bytes that ``blocks`` need on a device when those of the indices ``recomputed`` are computed again."""
    stays = sum(block.states for block in blocks)
    kept = sum(block.kept - (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    peaks = (block.working + (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    return stays + device.in_flight * kept + max(peaks, default=0.0)


class _Kind(NamedTuple):
    """Blocks that cost and save alike when they are computed again."""

    again: float
    saves: float
    working: float

    @classmethod
    def of(cls, block: Block) -> _Kind:
        return cls(block.again, block.saves, block.working)


class _Chain:
    """What is known of all stages ``[start:stop]`` at once: sums up to a block, and matrices ``[stop, start]``."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks, self.size = blocks, len(blocks)
        self.seconds = _total([block.seconds for block in blocks])
        self.states = _total([block.states for block in blocks])
        self.kept = _total([block.kept for block in blocks])
        self.saves = _total([block.saves for block in blocks])
        self.working = self.most([block.working for block in blocks])
        self.sends = torch.tensor([0.0, *(block.sends for block in blocks[:-1]), 0.0], dtype=torch.float64)
        self.inner = torch.tensor([0.0, *[1.0] * (self.size - 1), 0.0], dtype=torch.float64)
        kinds: dict[_Kind, list[int]] = {}
        for at, block in enumerate(blocks):
            if block.saves:
                kinds.setdefault(_Kind.of(block), []).append(at)
        cheapest_first = sorted(kinds, key=lambda kind: (kind.again / kind.saves, -kind.saves))
        self.members = {kind: self._up_to(kinds[kind]) for kind in cheapest_first}
        """By kind, the cheapest byte first: how many there are up to a block."""

    def _up_to(self, members: list[int]) -> Tensor:
        counts = torch.zeros(self.size + 1, dtype=torch.float64)
        counts[torch.tensor(members) + 1] = 1.0
        return counts.cumsum(0)

    def most(self, values: list[float]) -> Tensor:
        """The largest of each stage."""
        grid = torch.full((self.size + 1, self.size + 1), -math.inf, dtype=torch.float64)
        below = torch.arange(self.size)[:, None] >= torch.arange(self.size)
        grid[1:, :-1] = torch.where(below, torch.tensor(values, dtype=torch.float64)[:, None], -math.inf)
        return grid.cummax(0).values

    def held(self, device: Device, start: Tensor, stop: Tensor) -> Tensor:
        """Bytes that stages hold between backwards, if nothing is computed again."""
        return self.states[stop] - self.states[start] + device.in_flight * (self.kept[stop] - self.kept[start])

    def chosen(
        self, device: Device, start: Tensor, stop: Tensor
    ) -> tuple[list[tuple[_Kind, Tensor, Tensor]], Tensor, Tensor]:
        """What is computed again so that stages fit: of each kind in which of them how many blocks.

        Returns: that, the seconds that it takes on a device of speed 1, and whether the stages fit then.
        """
        held, peak = self.held(device, start, stop), self.working[stop, start]
        seconds = torch.zeros_like(held)
        room = device.memory * ROUNDING
        taken = []
        for kind, members in self.members.items():
            able = members[stop] - members[start]
            (at,) = ((able > 0) & (held + peak > room)).nonzero(as_tuple=True)
            size = device.in_flight * kind.saves
            higher = peak[at].clamp(min=kind.working + kind.saves)
            number = ((held[at] + higher - room) / size).ceil().clamp(min=1.0).minimum(able[at])
            held[at] -= number * size
            peak[at] = higher
            seconds[at] += number * kind.again
            taken.append((kind, at, number))
        return taken, seconds, held + peak <= room

    def costs(self, device: Device, spare: bool) -> Tensor:
        """The seconds of each stage on a device; infinite where it does not fit.

        Args:
            device: on which.
            spare: whether it may stay without blocks.
        """
        link = 2 * (device.latency * self.inner + self.sends / device.bandwidth)
        stop, start = torch.tril_indices(self.size + 1, self.size + 1, -1)
        again = torch.zeros(len(start), dtype=torch.float64)
        if device.memory < math.inf:
            need = self.held(device, start, stop) + self.working[stop, start]
            least = need - device.in_flight * (self.saves[stop] - self.saves[start])
            again.masked_fill_(need > device.memory * ROUNDING, math.inf)
            (short,) = ((need > device.memory * ROUNDING) & (least <= device.memory)).nonzero(as_tuple=True)
            _, seconds, fits = self.chosen(device, start[short], stop[short])
            again[short] = seconds.where(fits, math.inf)
        grid = torch.full((self.size + 1, self.size + 1), math.inf, dtype=torch.float64)
        own = (self.seconds[stop] - self.seconds[start] + again) / device.speed
        grid[stop, start] = own + link[stop] + link[start]
        return grid.fill_diagonal_(0.0 if spare else math.inf)

    def stage(self, device: Device, at: int, start: int, stop: int, seconds: float) -> Stage:
        """A stage that fits the device, with the blocks that are computed again: the first ones of each kind."""
        numbers: dict[_Kind, int] = {}
        mine = self.blocks[start:stop]
        if memory_of(mine, device) > device.memory * ROUNDING:
            taken, _, _ = self.chosen(device, torch.tensor([start]), torch.tensor([stop]))
            numbers = {kind: int(number.sum()) for kind, _, number in taken}
        again = []
        for index, block in enumerate(mine):
            kind = _Kind.of(block)
            if block.saves and numbers.get(kind, 0) > 0:
                numbers[kind] -= 1
                again.append(index)
        memory = memory_of(mine, device, frozenset(again))
        return Stage(at, start, stop, tuple(start + index for index in again), seconds, memory)


def _total(values: list[float]) -> Tensor:
    return torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)


# -- all of them -------------------------------------------------------------------------------------------------


def partition(blocks: Sequence[Block], devices: Sequence[Device], spare: bool = True) -> Split:
    """Split a chain over devices so that the slowest stage takes the least time; see the head of this file.

    Args:
        blocks: in the order in which they run.
        devices: in the order in which they get them.
        spare: a device may stay without blocks; else each gets one at least.

    Raises:
        DoesNotFit: no split was found that fits, with what is missing.
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
    chain = _Chain(blocks)
    reached = torch.full((len(blocks) + 1,), math.inf, dtype=torch.float64)
    reached[0] = 0.0
    costs: dict[Device, Tensor] = {}
    starts: list[list[int]] = []  # by device and stop: where its stage starts in the best split so far
    seconds: list[list[float]] = []
    for device in devices:
        if device not in costs:
            if len(costs) == MATRICES:
                costs.clear()
            costs[device] = chain.costs(device, spare)
        reached, best = torch.maximum(costs[device], reached).min(1)
        starts.append(best.tolist())
        seconds.append(costs[device].gather(1, best[:, None])[:, 0].tolist())
    if not math.isfinite(float(reached[-1])):
        raise _too_large(blocks, devices, spare)
    stages, stop = list[Stage](), len(blocks)
    for at in reversed(range(len(devices))):
        start = starts[at][stop]
        if start < stop:
            stages.append(chain.stage(devices[at], at, start, stop, seconds[at][stop]))
        stop = start
    return Split(tuple(reversed(stages)))


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
    backward = torch.arange(chain.size + 1)[:, None] < torch.arange(chain.size + 1)
    reached = torch.full((chain.size + 1,), math.inf, dtype=torch.float64)
    reached[0] = -math.inf
    for device in devices:
        stays = chain.states + device.in_flight * chain.kept
        again = stays - device.in_flight * chain.saves
        peak = chain.most([block.working + block.saves for block in blocks])
        need = torch.minimum(stays[:, None] - stays + chain.working, again[:, None] - again + peak)
        need = (need - device.memory).masked_fill_(backward, math.inf).fill_diagonal_(-math.inf if spare else math.inf)
        reached = torch.maximum(need, reached).amin(1)
    return float(reached[-1])
