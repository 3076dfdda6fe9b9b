"""Which blocks the stages of a pipeline take: the best split there is, when it changes, and what blocks cost."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from lockstep.extensions.balancing.pipeline.chain import Chain
from lockstep.extensions.balancing.pipeline.control import (
    BlockCost,
    SplitControl,
    StageCost,
    StageLook,
    shares_of_blocks,
)
from lockstep.extensions.balancing.pipeline.layout import Layout
from lockstep.extensions.balancing.pipeline.probe import Like, probe
from lockstep.extensions.balancing.pipeline.stages import Stages
from lockstep.extensions.balancing.pipeline.times import AFTER, BACKWARD, BLOCKS, StageTimes, typical
from lockstep.extensions.balancing.planner.partition import Block, Device, partition
from tests.extensions.balancing.balanced import Clock, QueuedWork


def splits(blocks: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, blocks), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, blocks))) for cut in cuts]


def control(shares: list[float], chains: list[float], counts: tuple[int, ...], **given: float) -> SplitControl:
    blocks = [BlockCost(each / sum(shares), **given) for each in shares]
    return SplitControl(blocks, [StageCost(each) for each in chains], counts)


def test_the_first_split_is_the_best_of_all() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        count, stages = draw.randint(4, 9), draw.randint(2, 4)
        found = control(
            [draw.uniform(1, 5) for _ in range(count)], [draw.uniform(1, 4) for _ in range(stages)], (1,) * stages
        )
        found.stages = [
            StageCost(stage.chain, draw.uniform(0, 1) if at in (0, stages - 1) else 0.0)
            for at, stage in enumerate(found.stages)
        ]
        best = min(max(found.predict(each)) for each in splits(count, stages))
        assert max(found.predict(found.best())) == pytest.approx(best)


def test_no_stage_is_left_empty() -> None:
    """A device that is very slow was left without blocks, and a pipeline has no stage for it."""
    assert control([1.0] * 4, [1.0, 100.0, 1.0], (2, 1, 1)).best() in ((1, 1, 2), (2, 1, 1))
    with pytest.raises(ValueError, match="2 blocks are too few for 3 devices"):
        partition([Block(seconds=1.0)] * 2, [Device()] * 3, spare=False)


def test_memory_bounds_what_a_fast_stage_takes() -> None:
    found = control([1.0] * 8, [1.0, 3.0], (4, 4), stays=10.0)
    assert found.best() == (6, 2)
    found.stages = [StageCost(1.0, memory=45.0), StageCost(3.0)]
    assert found.best() == (4, 4)
    found.stages = [StageCost(1.0, memory=25.0), StageCost(3.0, memory=25.0)]
    assert found.best() == (6, 2)  # by speed alone, with a word
    assert "8 blocks do not fit 2 devices in a row" in found.warning


def test_stages_that_are_alike_keep_their_blocks() -> None:
    found = control([1.0] * 8, [1.0, 1.0], (4, 4))
    kept = found.first("measured", 4)
    assert kept.before == kept.after == (4, 4)
    assert str(kept) == "stages keep 4, 4 blocks (measured): 500, 500 ms of a micro-batch"
    assert all(found.look([StageLook(0.5 + noise), StageLook(0.5)], 4) is None for noise in (0.0, 0.03, -0.04, 0.05))


def test_what_a_moment_shows_moves_blocks_only_for_a_large_gain() -> None:
    """Blocks timed for a third of a second on a busy machine made one of two equal ranks a fifth slower."""
    found = control([1.0] * 12, [1.2, 1.0], (6, 6))
    assert found.best() == (5, 7)
    assert found.first("measured", 8).after == (6, 6)
    assert control([1.0] * 12, [2.0, 1.0], (6, 6)).first("measured", 8).after == (4, 8)


def test_a_stage_that_becomes_slow_gives_blocks_at_once_and_takes_them_back() -> None:
    found = control([1.0] * 8, [1.0, 1.0], (4, 4))
    moved = found.look([StageLook(1.5), StageLook(0.5)], 4)
    assert moved is not None
    assert (moved.before, moved.after, moved.predicted) == ((4, 4), (2, 6), (0.75, 0.75))
    assert moved.gain == 2.0
    assert found.look([StageLook(0.75), StageLook(0.75)], 4) is None
    back = found.look([StageLook(0.25), StageLook(0.75)], 4)
    assert back is not None
    assert back.after == (4, 4)


def test_blocks_stay_where_moving_costs_more_than_it_saves() -> None:
    looks = [StageLook(1.5e-3), StageLook(0.5e-3)]
    found = control([1.0] * 8, [1.0, 1.0], (4, 4), moves=1e9)
    assert found.look(looks, 4) is None  # 2 s, to save 3 ms a window
    found = control([1.0] * 8, [1.0, 1.0], (4, 4), moves=1e6)
    assert found.look(looks, 4) is not None
    found = control([1.0] * 8, [1.0, 1.0], (4, 4), moves=1e6)
    found.record_move(1e6, 1.0)  # blocks have moved slowly before
    assert found.look(looks, 4) is None


def test_a_clock_that_stood_still_changes_nothing() -> None:
    found = control([1.0] * 4, [1.0, 1.0], (2, 2))
    assert found.look([StageLook(0.0), StageLook(1.0)], 4) is None
    assert found.look([StageLook(float("nan")), StageLook(1.0)], 4) is None


def test_blocks_of_a_kind_whose_times_are_close_count_as_equal() -> None:
    seconds = [[1.0, 1.2, 1.1, 9.0], [2.0, 2.6, 2.4, 18.0]]
    first, second, third, other = shares_of_blocks(seconds, ["a", "a", "a", "a"])
    assert first == second == third
    assert other == pytest.approx(8, rel=0.1) or other > 0.7  # of the same kind, and not close


# -- what is measured ------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """A block with a buffer that counts calls, whose time is made up."""

    calls: Tensor

    def __init__(self, clock: Clock, units: float) -> None:
        super().__init__()
        self.clock, self.units, self.linear = clock, units, nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.clock.now += self.units
        return torch.dropout(self.linear(x), 0.5, True)


def stages_of(module: nn.Module) -> Stages:
    chain = Chain(module)
    return Stages(chain, Layout((len(chain.blocks),), 1), None, {0: torch.device("cpu")})


def test_blocks_are_measured_and_left_as_they_were() -> None:
    clock = Clock()
    module = nn.ModuleDict({"net": nn.Sequential(*(Counts(clock, units) for units in (1.0, 3.0, 2.0)))})
    net = module["net"]
    stood_in = net[1].linear.weight
    stood_in.data = torch.full((), float("nan")).expand(4, 4)
    net[0].linear.weight.grad = gradient = torch.ones(4, 4)
    before = torch.random.get_rng_state()
    like = Like(torch.Size([2, 4]), torch.float32, True)
    seconds, kept = probe(stages_of(module), like, torch.device("cpu"), clock)
    assert seconds == pytest.approx((1.0, 3.0, 2.0))
    assert all(64 <= each <= 256 for each in kept)  # a mask and an output of 8 numbers, and the input
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [int(block.calls) for block in net] == [0, 0, 0]
    assert stood_in.isnan().all()
    assert not any(stood_in.stride())
    assert net[0].linear.weight.grad is gradient
    assert all(p.grad is None for p in module.parameters() if p is not net[0].linear.weight)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_window_is_measured_by_part(on_gpu: bool) -> None:
    work = QueuedWork()
    times = StageTimes(torch.device("cpu"), work.event if on_gpu else None)
    times.clock = lambda: work.queued
    parts = {part: times.wrapped(part, work.passes) for part in (BLOCKS, AFTER, BACKWARD)}
    parts[BLOCKS](9.0)  # of no window
    with times.window(2):
        for _ in range(2):
            parts[BLOCKS](1.0)
            parts[AFTER](0.5)
            work.passes(7.0)  # waits
            parts[BACKWARD](3.0)
    if on_gpu:
        assert times.take() == []
        work.done = work.queued
    (window,) = times.take()
    assert window.seconds == pytest.approx((0.0, 2.0, 1.0, 6.0))
    assert typical([window]) == pytest.approx((3.0, 1.5, 2.0))
    assert window.end - window.begin == pytest.approx(23.0)
    assert times.take() == []
