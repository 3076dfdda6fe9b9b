"""Exchange of measured times between a pipeline's ranks, to decide how many blocks each rank runs.

A process that drives several devices measures each device, and sends one row for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.extensions.balancing.pipeline.control import (
    BlockCost,
    Resplit,
    SplitControl,
    StageCost,
    StageLook,
    shares_of_blocks,
)
from lockstep.extensions.balancing.pipeline.layout import Ownership
from lockstep.extensions.balancing.pipeline.probe import Like, probe, states_of
from lockstep.extensions.balancing.pipeline.stages import Stages, Turn
from lockstep.extensions.balancing.pipeline.times import StageTimes, typical
from lockstep.extensions.balancing.planner.profile import kind_of
from lockstep.extensions.balancing.planner.timeline import most_in_flight
from lockstep.ground import comm
from lockstep.ground.memory_use import free_memory
from lockstep.ground.seed import forked_random_numbers

SOONEST, LATEST = 8, 32
"""Windows between two exchanges: after a change or while one is considered, and after a while without changes."""
MEASURED = 8
"""Windows before an exchange that are measured."""
ROOM = 0.9
"""Fraction of a rank's free memory that blocks may fill."""
ROW = 3


@dataclass(frozen=True)
class _DeviceReport:
    """Measured seconds of each block on one device, and the device's memory for blocks."""

    place: int
    seconds: tuple[float, ...]
    keeps: tuple[int, ...]
    states: float
    memory: float
    count: int
    """Number of micro-batches in the accumulation window."""


class MeasuredSplit:
    """Controller that exchanges times between a pipeline's ranks, and decides when blocks move to other ranks.

    Args:
        times: timers of this process's windows, by position in the pipeline.
        ranks: number of ranks of a pipeline.
        ranks_of_host: number of ranks that share the memory of a host.

    Attributes:
        control: makes the decisions; None before the blocks were measured.
    """

    def __init__(self, times: Mapping[int, StageTimes], ranks: int, ranks_of_host: int) -> None:
        self.times = times
        self.control: SplitControl | None = None
        self._ranks, self._ranks_of_host = ranks, ranks_of_host
        self._rows: comm.RowExchange | None = None
        self._period, self._since = SOONEST, 0

    def at_boundary(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], turns: Sequence[Turn]
    ) -> Resplit | None:
        """Return the change of the split that is due before the next accumulation window, or None. Collective.

        Args:
            stages: this rank's stages.
            owned: ranks that store each parameter.
            optimizers: the fit's optimizers.
            turns: the micro-batches of the next window.
        """
        if self.control is None:
            return self._measure(stages, owned, optimizers, turns)
        # an exchange is read one window after it was started, so that no rank waits for it
        if self._rows is not None:
            return self._read(self.control, self._rows)
        self._since += 1
        if self._since >= self._period:
            self._since = 0
            entry = [number for each in self.times.values() for number in typical(each.take()[-MEASURED:])]
            self._rows = comm.RowExchange(entry)
        for each in self.times.values():
            each.listens = self._period - self._since <= MEASURED
        return None

    def _read(self, control: SplitControl, rows: comm.RowExchange) -> Resplit | None:
        by_rank, self._rows = rows.read(), None
        by_device = [row[at : at + ROW] for row in by_rank for at in range(0, len(row), ROW)]
        looks, count = [], 0.0
        for place in range(self._ranks):
            # replicas have one split, so the slowest of them counts
            measured = [row for row in by_device[place :: self._ranks] if not math.isnan(row[0])]
            slowest = max(measured, key=lambda row: row[0] + row[1], default=[math.nan, math.nan, 0.0])
            looks.append(StageLook(*slowest[:2]))
            count = max(count, slowest[2])
        found = control.look(looks, int(count))
        if found is not None:
            self._forget()  # windows of the previous split
        self._period = SOONEST if found is not None or control.is_undecided else min(2 * self._period, LATEST)
        return found

    # -- blocks by themselves

    def _measure(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], turns: Sequence[Turn]
    ) -> Resplit | None:
        """Measure all blocks on each device, and return the first decision on the split; None without samples."""
        like, takes_more = _input_of(stages, turns)
        extras_of = partial(stages.extras_of, turns[0].take) if takes_more else tuple
        mine: list[_DeviceReport] = []
        if like is not None:
            states = states_of(optimizers)
            for place, device in stages.devices.items():
                seconds, kept = probe(stages, like, device, self.times[place].clock, extras_of)
                room = self._room(stages, owned, optimizers, states, place)
                mine.append(_DeviceReport(place, seconds, kept, states, room, len(turns)))
        reports: list[_DeviceReport] = [each for of_rank in comm.all_gather_object(mine) for each in of_rank]
        if not reports:
            return None
        count = max(report.count for report in reports)
        keeps = [max(of_block) for of_block in zip(*(report.keeps for report in reports), strict=True)]
        sizes = sizes_of(stages, max(report.states for report in reports))
        kinds = [kind_of(block) for block in stages.chain.blocks]
        shares = shares_of_blocks([report.seconds for report in reports], kinds)
        blocks = [BlockCost(share, *size, float(kept)) for share, size, kept in zip(shares, sizes, keeps, strict=True)]
        costs = _costs_of_stages(stages, reports, count)
        self.control = SplitControl(blocks, costs, stages.layout.counts)
        took = ", ".join(f"{cost.chain * 1e3:.3g}" for cost in costs[: stages.layout.ranks])
        self._forget()
        where = "devices" if stages.has_all else "ranks"
        return self.control.first(f"the stages' {where} run all blocks in {took} ms", count)

    def _forget(self) -> None:
        """Discard the times that were measured so far."""
        for each in self.times.values():
            each.take()

    def _room(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], states: float, place: int
    ) -> float:
        """Return the bytes that a device has for blocks, including those that its current blocks occupy."""
        free = free_memory(stages.devices[place], self._ranks_of_host)
        if free is None:
            return math.inf
        chain, layout = stages.chain, stages.layout
        here = [number for stage in layout.stages_of(place) for number in layout.blocks_of(stage)]
        in_blocks = _parameters_of(chain.blocks[number] for number in here)
        own = [parameter for parameter in owned.local if id(parameter) in in_blocks]
        kept = [optimizer.state[p] for optimizer in optimizers for p in own if p in optimizer.state]
        now = sum(parameter.nbytes for parameter in own)
        now += sum(value.nbytes for state in kept for value in state.values() if isinstance(value, Tensor))
        # gradients and states of layers outside the chain are allocated in the first step only
        later = 0.0
        if place == stages.root:
            inside = _parameters_of(chain.blocks)
            outside = [p for p in owned.local if id(p) not in inside and p.requires_grad]
            later = sum(p.nbytes for p in outside) * (1 + states)
        return ROOM * max(free + now - later, 0.0)

    def close(self) -> None:
        """Finish a pending exchange of times without reading the result."""
        if self._rows is not None:
            self._rows.send_only()
            self._rows = None


def _costs_of_stages(stages: Stages, reports: Sequence[_DeviceReport], count: int) -> list[StageCost]:
    """Return, for each stage, its device's seconds for all blocks of the chain, and the memory for the stage."""
    costs, layout = [], stages.layout
    each_of = layout.stages // layout.ranks
    in_flight = {stage: most for mine in stages.actions(count) for stage, most in most_in_flight(mine).items()}
    for stage in range(layout.stages):
        place = layout.place_of(stage)
        # one report from each replica: the slowest, and the smallest memory, count
        mine = [report for report in reports if report.place == place]
        chain, memory = max(sum(report.seconds) for report in mine), min(report.memory for report in mine)
        costs.append(StageCost(chain, 0.0, memory / each_of, in_flight[stage], place))
    return costs


def _parameters_of(blocks: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters of blocks."""
    return {id(parameter) for block in blocks for parameter in block.parameters()}


def _input_of(stages: Stages, turns: Sequence[Turn]) -> tuple[Like | None, bool]:
    """Return (description of the first block's input, True if blocks take further arguments). Collective.

    The description is None if the window has no samples.
    """
    found: tuple[Like | None, bool] = None, False
    if turns and stages.has_first:
        # the step runs again in its window, with the same random numbers
        with forked_random_numbers(stages.devices.values()):
            x, extras = stages.begin(turns[0])
        found = Like.of(x), bool(extras)
    first = 0 if stages.has_all else stages.layout.place_of(0)
    received: tuple[Like | None, bool] = comm.broadcast_object(found, first, stages.group)
    return received


def sizes_of(stages: Stages, states: float) -> list[tuple[float, float]]:
    """Return, for each block, (bytes to send when the block moves, bytes that the block needs on a rank).

    Args:
        stages: stages of the chain.
        states: bytes of optimizer states for a byte of a trained parameter.
    """
    found = []
    for block in stages.chain.blocks:
        plain = sum(p.nbytes for p in block.parameters()) + sum(buffer.nbytes for buffer in block.buffers())
        trained = sum(p.nbytes for p in block.parameters() if p.requires_grad)
        moves = plain + states * trained
        found.append((moves, moves + trained))
    return found
