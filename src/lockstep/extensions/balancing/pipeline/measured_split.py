"""The ranks of a pipeline measure their blocks and their windows, tell one another, and decide alike on a split.

A process that drives several devices measures each of them, and has as many rows to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.extensions.balancing.pipeline.chain import Extras
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
from lockstep.extensions.balancing.planner.timeline import held
from lockstep.ground import comm
from lockstep.ground.memory_use import free_memory
from lockstep.ground.seed import forked_random_numbers

SOONEST, LATEST = 8, 32
"""Windows from one look to the next: where a change is made or weighed, and when nothing has changed for a while."""
MEASURED = 8
"""Windows before a look that are measured."""
ROOM = 0.9
"""The part of a rank's free memory that blocks may fill."""
ROW = 3


@dataclass(frozen=True)
class _Told:
    """What is told once of a device: what the blocks took it, and what it has room for."""

    place: int
    seconds: tuple[float, ...]
    keeps: tuple[int, ...]
    states: float
    memory: float
    count: int
    """Micro-batches of the window."""


class MeasuredSplit:
    """What a pipeline's ranks know of their speed.

    Args:
        times: of this process's windows, by place in the pipeline.
        ranks: of a pipeline.
        ranks_of_host: that share its memory.

    Attributes:
        control: decides; None before the blocks were measured.
    """

    def __init__(self, times: Mapping[int, StageTimes], ranks: int, ranks_of_host: int) -> None:
        self.times = times
        self.control: SplitControl | None = None
        self._ranks, self._ranks_of_host = ranks, ranks_of_host
        self._rows: comm.RowsToCome | None = None
        self._period, self._since = SOONEST, 0

    def at_boundary(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], turns: Sequence[Turn]
    ) -> Resplit | None:
        """Before a window: the split that was decided on; None: nothing was. Collective.

        Args:
            stages: of this rank.
            owned: what it holds.
            optimizers: of the fit.
            turns: the micro-batches of the window to come.
        """
        if self.control is None:
            return self._measure(stages, owned, optimizers, turns)
        if self._rows is not None:
            return self._hear(self.control, self._rows)
        self._since += 1
        if self._since >= self._period:
            self._since = 0
            told = [number for each in self.times.values() for number in typical(each.take()[-MEASURED:])]
            self._rows = comm.RowsToCome(told)
        for each in self.times.values():
            each.listens = self._period - self._since <= MEASURED
        return None

    def _hear(self, control: SplitControl, rows: comm.RowsToCome) -> Resplit | None:
        by_rank, self._rows = rows.read(), None
        by_device = [row[at : at + ROW] for row in by_rank for at in range(0, len(row), ROW)]
        looks, count = [], 0.0
        for place in range(self._ranks):  # of several pipelines the slowest counts
            told = [row for row in by_device[place :: self._ranks] if not math.isnan(row[0])]
            slowest = max(told, key=lambda row: row[0] + row[1], default=[math.nan, math.nan, 0.0])
            looks.append(StageLook(*slowest[:2]))
            count = max(count, slowest[2])
        found = control.look(looks, int(count))
        if found is not None:
            self._forget()  # these are of the split before
        self._period = SOONEST if found is not None or control.is_undecided else min(2 * self._period, LATEST)
        return found

    # -- blocks by themselves

    def _measure(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], turns: Sequence[Turn]
    ) -> Resplit | None:
        """Measure all blocks on each device; where a stage has no rank with samples, the next window does it."""
        like, takes_more = _input_of(stages, turns)
        extras_of = partial(stages.extras_of, turns[0].take) if takes_more else tuple
        told = [] if like is None else self._told(stages, owned, optimizers, like, extras_of, len(turns))
        ranks: list[_Told] = [each for of_rank in comm.all_gather_object(told) for each in of_rank]
        if not ranks:
            return None
        count = max(rank.count for rank in ranks)
        costs = _costs_of_stages(stages, ranks, count)
        self.control = SplitControl(_costs_of_blocks(stages, ranks), costs, stages.layout.counts)
        took = ", ".join(f"{cost.chain * 1e3:.3g}" for cost in costs[: stages.layout.ranks])
        self._forget()
        who = "devices" if stages.has_all else "ranks"
        return self.control.first(f"the stages' {who} run all blocks in {took} ms", count)

    def _forget(self) -> None:
        """Let windows that were measured until now not count."""
        for each in self.times.values():
            each.take()

    def _told(
        self,
        stages: Stages,
        owned: Ownership,
        optimizers: Sequence[Optimizer],
        like: Like,
        extras_of: Callable[[], Extras],
        count: int,
    ) -> list[_Told]:
        """Of each device of this process."""
        states, told = states_of(optimizers), []
        for place, device in stages.devices.items():
            found = probe(stages, like, device, self.times[place].clock, extras_of)
            seconds, keeps = tuple(max(each.seconds, 1e-9) for each in found), tuple(each.keeps for each in found)
            room = self._room(stages, owned, optimizers, states, place)
            told.append(_Told(place, seconds, keeps, states, room, count))
        return told

    def _room(
        self, stages: Stages, owned: Ownership, optimizers: Sequence[Optimizer], states: float, place: int
    ) -> float:
        """Bytes that a device of this rank has for blocks, with those that its own take now."""
        free = free_memory(stages.devices[place], self._ranks_of_host)
        if free is None:
            return math.inf
        chain, layout = stages.chain, stages.layout
        here = [number for stage in layout.stages_of(place) for number in layout.blocks_of(stage)]
        in_blocks = _parameters_of(chain.blocks[number] for number in here)
        own = [parameter for parameter in owned.held if id(parameter) in in_blocks]
        now = sum(parameter.nbytes for parameter in own) + _bytes_of_states(optimizers, own)
        to_come = 0.0
        if place == stages.root:
            inside = _parameters_of(chain.blocks)
            outside = [p for p in owned.held if id(p) not in inside and p.requires_grad]
            to_come = sum(p.nbytes for p in outside) * (1 + states)
        return ROOM * max(free + now - to_come, 0.0)

    def close(self) -> None:
        """Give back what the ranks talk over."""
        if self._rows is not None:
            self._rows.leave()
            self._rows = None


def _costs_of_blocks(stages: Stages, ranks: Sequence[_Told]) -> list[BlockCost]:
    """What each block takes, by all devices' measurements."""
    keeps = [max(of_block) for of_block in zip(*(rank.keeps for rank in ranks), strict=True)]
    sizes = sizes_of(stages, max(rank.states for rank in ranks))
    shares = shares_of_blocks([rank.seconds for rank in ranks], [kind_of(block) for block in stages.chain.blocks])
    return [BlockCost(share, *size, float(kept)) for share, size, kept in zip(shares, sizes, keeps, strict=True)]


def _costs_of_stages(stages: Stages, ranks: Sequence[_Told], count: int) -> list[StageCost]:
    """What each stage's device needs for all blocks, and has room for; of several pipelines the least able counts."""
    costs, layout = [], stages.layout
    each_of, in_flight = layout.stages // layout.ranks, _in_flight(stages, count)
    for stage in range(layout.stages):
        place = layout.place_of(stage)
        mine = [rank for rank in ranks if rank.place == place]
        chain, memory = max(sum(rank.seconds) for rank in mine), min(rank.memory for rank in mine)
        costs.append(StageCost(chain, 0.0, memory / each_of, in_flight[stage], place))
    return costs


def _in_flight(stages: Stages, micro_batches: int) -> list[float]:
    """Micro-batches whose activations each of all stages holds at the same time, at most."""
    of_stages = {stage: most for mine in stages.actions(micro_batches) for stage, most in held(mine).items()}
    return [of_stages[stage] for stage in range(stages.layout.stages)]


def _parameters_of(blocks: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters of blocks."""
    return {id(parameter) for block in blocks for parameter in block.parameters()}


def _bytes_of_states(optimizers: Sequence[Optimizer], parameters: Sequence[Parameter]) -> int:
    """What optimizers hold for parameters."""
    kept = [optimizer.state[p] for optimizer in optimizers for p in parameters if p in optimizer.state]
    return sum(value.nbytes for state in kept for value in state.values() if isinstance(value, Tensor))


def _input_of(stages: Stages, turns: Sequence[Turn]) -> tuple[Like | None, bool]:
    """What a micro-batch's step calls the chain with, and whether blocks take more; None without one. Collective.

    The step draws the same random numbers again later.
    """
    found: tuple[Like | None, bool] = None, False
    if turns and stages.has_first:
        with forked_random_numbers(stages.devices.values()):
            x, extras = stages.begin(turns[0])
        found = Like.of(x), bool(extras)
    first = 0 if stages.has_all else stages.layout.place_of(0)
    told: tuple[Like | None, bool] = comm.broadcast_object(found, first, stages.group)
    return told


def sizes_of(stages: Stages, states: float) -> list[tuple[float, float]]:
    """Bytes of each block that move with it, and those that it takes on its rank.

    Args:
        stages: of the chain.
        states: bytes of optimizer states for a byte of a trained parameter.
    """
    found = []
    for block in stages.chain.blocks:
        plain = sum(p.nbytes for p in block.parameters()) + sum(buffer.nbytes for buffer in block.buffers())
        trained = sum(p.nbytes for p in block.parameters() if p.requires_grad)
        moves = plain + states * trained
        found.append((moves, moves + trained))
    return found
