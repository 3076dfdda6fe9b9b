"""Split of a chain of blocks over a sequence of devices that minimizes the seconds of the slowest device.

    split = partition([Block(seconds=1.0), Block(seconds=2.0)], [Device(), Device()])
    split.bottleneck

**Algorithm.** Chains-on-chains partitioning by dynamic programming (Pinar and Aykanat 2004 for equal processors and
2008 for unequal ones): with F[d, j] the least bottleneck of the first j blocks on the first d devices,
F[d, j] = min over i of max(F[d - 1, i], cost of blocks i to j on device d). It is exact without recomputation. In a
stage that needs too much memory, blocks are recomputed greedily, those with the fewest seconds a byte first, until it
fits (`_Chain.recompute`). The optimal choice would be a knapsack problem for each stage.

**Assumptions.** Devices keep the given order; one may stay without blocks, unless each must have one. A block's time on
a device is its time divided by the device's speed. A stage sends and receives the activation and its gradient one after
another over its own link, in addition to its computation. A device holds the activations of `Device.in_flight`
micro-batches at the same time. A recomputed block keeps its inputs for each of them, and all its activations for one
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
"""Maximum number of devices whose stage seconds are kept; for a thousand blocks each device takes 8 MB."""
ROUNDING = 1 + 1e-12
"""Factor on a device's memory, so that sums with rounding errors still fit."""

# -- blocks and devices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Cost of a block in a chain, for one micro-batch on a device of speed 1.

    Attributes:
        seconds: seconds of a forward and backward.
        again: seconds of a recomputation, which is another forward. Infinite: the block is never recomputed.
        states: bytes that stay for the whole step: parameters, gradients, optimizer states.
        kept: bytes that the forward keeps for the backward.
        inputs: the part of ``kept`` that a recomputed block keeps as well.
        working: additional bytes while the block runs.
        sends: bytes of the output, and of its gradient.
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
        """Bytes that a recomputation saves for each micro-batch; 0 if the block is never recomputed."""
        return max(self.kept - self.inputs, 0.0) if self.again < math.inf else 0.0


@dataclass(frozen=True)
class Device:
    """Speed, memory and link of one of the devices over which a chain is split.

    Attributes:
        speed: relative to the device on which the blocks were measured.
        memory: bytes that it has for blocks.
        bandwidth: bytes a second of its link.
        latency: seconds of a message.
        in_flight: micro-batches whose activations it holds at the same time; gradients may count as a fraction.
    """

    speed: float = 1.0
    memory: float = math.inf
    bandwidth: float = math.inf
    latency: float = 0.0
    in_flight: float = 1


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on one device, with their seconds and memory.

    Attributes:
        device: index of the device in the sequence.
        start: index of its first block.
        stop: index after its last block.
        recomputed: indices of the recomputed blocks.
        seconds: seconds of a micro-batch for computation, recomputation and messages.
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
    """Stages of a chain that is split over devices. Devices without blocks have no stage."""

    stages: tuple[Stage, ...]

    @property
    def bottleneck(self) -> float:
        """Seconds of the slowest stage, for one micro-batch."""
        return max((stage.seconds for stage in self.stages), default=0.0)


class DoesNotFit(ValueError):
    """Error for a chain that needs more memory than its devices have.

    Attributes:
        missing: bytes that each device would need in addition.
    """

    def __init__(self, message: str, missing: float) -> None:
        super().__init__(message)
        self.missing = missing


# -- stages --------------------------------------------------------------------------------------------------------


def memory_of(blocks: Sequence[Block], device: Device, recomputed: frozenset[int] = frozenset()) -> float:
    """Return the bytes that blocks need on a device if the blocks with indices ``recomputed`` are recomputed."""
    stays = sum(block.states for block in blocks)
    kept = sum(block.kept - (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    peaks = (block.working + (block.saves if at in recomputed else 0) for at, block in enumerate(blocks))
    return stays + device.in_flight * kept + max(peaks, default=0.0)


class _Kind(NamedTuple):
    """Key that is equal for blocks whose recomputation takes the same time and saves the same memory."""

    again: float
    saves: float
    working: float

    @classmethod
    def of(cls, block: Block) -> _Kind:
        return cls(block.again, block.saves, block.working)


class _Chain:
    """Calculator of the costs of all possible stages ``[start:stop]`` of a chain, in matrices ``[stop, start]``."""

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
        self.members: dict[_Kind, Tensor] = {}
        """Number of a kind's blocks up to a block, by kind, those with the fewest seconds a byte first."""
        for kind in sorted(kinds, key=lambda kind: (kind.again / kind.saves, -kind.saves)):
            counts = torch.zeros(self.size + 1, dtype=torch.float64)
            counts[torch.tensor(kinds[kind]) + 1] = 1.0
            self.members[kind] = counts.cumsum(0)

    def most(self, values: list[float]) -> Tensor:
        """Return a matrix ``[stop, start]`` with the largest of the blocks' ``values`` in each stage."""
        grid = torch.full((self.size + 1, self.size + 1), -math.inf, dtype=torch.float64)
        below = torch.arange(self.size)[:, None] >= torch.arange(self.size)
        grid[1:, :-1] = torch.where(below, torch.tensor(values, dtype=torch.float64)[:, None], -math.inf)
        return grid.cummax(0).values

    def between_backwards(self, device: Device, start: Tensor, stop: Tensor) -> Tensor:
        """Return the bytes that each stage ``[start:stop]`` needs between two backwards, without recomputation."""
        return self.states[stop] - self.states[start] + device.in_flight * (self.kept[stop] - self.kept[start])

    def recompute(
        self, device: Device, start: Tensor, stop: Tensor
    ) -> tuple[list[tuple[_Kind, Tensor, Tensor]], Tensor, Tensor]:
        """Choose which blocks of each stage ``[start:stop]`` to recompute, so that the stage fits the device.

        Returns:
            for each kind the stages concerned and their numbers of blocks; the seconds of the recomputation on a
            device of speed 1; and True for the stages that fit then.
        """
        stays, peak = self.between_backwards(device, start, stop), self.working[stop, start]
        seconds = torch.zeros_like(stays)
        room = device.memory * ROUNDING
        chosen = []
        for kind, members in self.members.items():
            able = members[stop] - members[start]
            (at,) = ((able > 0) & (stays + peak > room)).nonzero(as_tuple=True)
            size = device.in_flight * kind.saves
            # a recomputed block has all its activations while its backward runs, which may raise the peak
            higher = peak[at].clamp(min=kind.working + kind.saves)
            number = ((stays[at] + higher - room) / size).ceil().clamp(min=1.0).minimum(able[at])
            stays[at] -= number * size
            peak[at] = higher
            seconds[at] += number * kind.again
            chosen.append((kind, at, number))
        return chosen, seconds, stays + peak <= room

    def costs(self, device: Device, spare: bool) -> Tensor:
        """Return the seconds of each possible stage on a device; infinite for stages that do not fit.

        Args:
            device: the stage's device.
            spare: True if the device may have no blocks.
        """
        link = 2 * (device.latency * self.inner + self.sends / device.bandwidth)
        stop, start = torch.tril_indices(self.size + 1, self.size + 1, -1)
        again = torch.zeros(len(start), dtype=torch.float64)
        if device.memory < math.inf:
            need = self.between_backwards(device, start, stop) + self.working[stop, start]
            least = need - device.in_flight * (self.saves[stop] - self.saves[start])
            again.masked_fill_(need > device.memory * ROUNDING, math.inf)
            # the greedy choice is slow: only for stages that recomputation can make fit
            (short,) = ((need > device.memory * ROUNDING) & (least <= device.memory)).nonzero(as_tuple=True)
            _, seconds, fits = self.recompute(device, start[short], stop[short])
            again[short] = seconds.where(fits, math.inf)
        grid = torch.full((self.size + 1, self.size + 1), math.inf, dtype=torch.float64)
        own = (self.seconds[stop] - self.seconds[start] + again) / device.speed
        grid[stop, start] = own + link[stop] + link[start]
        return grid.fill_diagonal_(0.0 if spare else math.inf)

    def stage(self, device: Device, at: int, start: int, stop: int, seconds: float) -> Stage:
        """Create a stage that fits the device. Where needed, the first blocks of each kind are recomputed."""
        numbers: dict[_Kind, int] = {}
        mine = self.blocks[start:stop]
        if memory_of(mine, device) > device.memory * ROUNDING:
            chosen, _, _ = self.recompute(device, torch.tensor([start]), torch.tensor([stop]))
            numbers = {kind: int(number.sum()) for kind, _, number in chosen}
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


# -- the split ---------------------------------------------------------------------------------------------------


def partition(blocks: Sequence[Block], devices: Sequence[Device], spare: bool = True) -> Split:
    """Split a chain over devices so that the slowest stage is as fast as possible.

    Args:
        blocks: the blocks, in the order in which they run.
        devices: the devices, in the order of their blocks.
        spare: True if a device may stay without blocks.

    Returns:
        the split: for each stage its first block and the block after its last one, from 0.

    Raises:
        DoesNotFit: no split that fits was found.
        ValueError: there are no blocks or no devices, or fewer blocks than devices with ``spare=False``.

    Example:
        >>> chain = [Block(seconds=1.0), Block(seconds=1.0), Block(seconds=4.0)]
        >>> [(s.start, s.stop) for s in partition(chain, [Device(), Device(speed=2.0)]).stages]
        [(0, 2), (2, 3)]
    """
    if not blocks or not devices:
        raise ValueError(f"partition: {len(blocks)} blocks over {len(devices)} devices: pass at least one of each")
    if not spare and len(blocks) < len(devices):
        raise ValueError(f"partition: {len(blocks)} blocks are too few for {len(devices)} devices: pass fewer devices")
    chain = _Chain(blocks)
    reached = torch.full((len(blocks) + 1,), math.inf, dtype=torch.float64)
    reached[0] = 0.0
    costs: dict[Device, Tensor] = {}
    starts: list[list[int]] = []  # by device and stop, the start of its stage in the best split so far
    seconds: list[list[float]] = []
    for device in devices:
        if device not in costs:
            # a row of a thousand unequal devices would fill the memory
            if len(costs) == MATRICES:
                costs.clear()
            costs[device] = chain.costs(device, spare)
        reached, best = torch.maximum(costs[device], reached).min(1)
        starts.append(best.tolist())
        seconds.append(costs[device].gather(1, best[:, None])[:, 0].tolist())
    if not math.isfinite(float(reached[-1])):
        raise _too_large(blocks, devices, spare)
    # from the last device back to the first, the starts give the split
    stages, stop = list[Stage](), len(blocks)
    for at in reversed(range(len(devices))):
        start = starts[at][stop]
        if start < stop:
            stages.append(chain.stage(devices[at], at, start, stop, seconds[at][stop]))
        stop = start
    return Split(tuple(reversed(stages)))


def _too_large(blocks: Sequence[Block], devices: Sequence[Device], spare: bool) -> DoesNotFit:
    """Return an error that names a block that is too large for every device, or else the memory that is missing."""
    missing = _missing(blocks, devices, spare)
    for index, block in enumerate(blocks):
        gaps = []
        for device in devices:
            needs = [memory_of([block], device, chosen) for chosen in (frozenset[int](), frozenset({0}))]
            gaps.append(min(needs) - device.memory)
        if min(gaps) > 0:
            return DoesNotFit(
                f"block {index} alone needs {min(gaps):.0f} bytes more than any device has: use smaller micro-batches, "
                "or divide the block",
                max(missing, min(gaps)),
            )
    return DoesNotFit(
        f"{len(blocks)} blocks do not fit {len(devices)} devices in a row: each would need {missing:.0f} bytes more. "
        "Use more devices, smaller micro-batches, or fewer at the same time",
        missing,
    )


def _missing(blocks: Sequence[Block], devices: Sequence[Device], spare: bool) -> float:
    """Return the smallest number of bytes that, added to each device's memory, would make a split possible."""
    # the same dynamic programming, with missing bytes in the place of seconds
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
