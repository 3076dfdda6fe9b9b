"""The equivalence harness catches what can go wrong between ranks, and names it.

Each fault is planted inside the rank processes, in the same case that passes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data import feed
from lockstep.data.window import Window
from lockstep.engines import buffers
from lockstep.engines.ddp import strategy as ddp
from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.shared_memory import SharedReduction
from lockstep.strategies import DDPStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Plain, Running, Sometimes, Weighted, rows
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)

Plant = Callable[[], AbstractContextManager[Any]]
CLIP = {"gradient_clip_val": 0.5}
HEALTHY: set[Any] = set()
"""The cases of which it has been seen that nothing is to be said of them without a fault."""
EVERY = {name for name, _ in Plain().named_parameters()}
PAIRS = [(2, 3), (3, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 3, marks=pytest.mark.slow)]
"""World and accumulation: every day each once."""


def report_with(
    ranks: RankPool, plant: Plant, make: Callable[[], Any] = Plain, length: int = 72, world: int = 2, **given: Any
) -> EquivalenceReport:
    """The ranks' common report: without the fault it has nothing to say, with it it has."""

    def check(planted: Plant) -> EquivalenceReport:
        with planted():
            return check_equivalence(make, rows(length), devices=world, **given)

    case = (make, length, world, repr(sorted(given.items())))
    if case not in HEALTHY:
        healthy = ranks(world).run(check, nullcontext, group=False)[0]
        assert healthy, healthy
        HEALTHY.add(case)
    reports = ranks(world).run(check, plant, group=False)
    assert all(report == reports[0] for report in reports)
    report: EquivalenceReport = reports[0]
    assert not report
    return report


def names(report: EquivalenceReport) -> set[str]:
    return {difference.name for difference in report.first}


# -- a dropped bucket


def bucket_1_is_not_reduced() -> AbstractContextManager[Any]:
    start, wait = SharedReduction.start, SharedReduction.wait

    def started(self: SharedReduction, bucket: Bucket, scale: float) -> None:
        if bucket.index == 1:
            bucket.flat.mul_(scale)
        else:
            start(self, bucket, scale)

    def waited(self: SharedReduction, bucket: Bucket) -> None:
        if bucket.index != 1:
            wait(self, bucket)

    return patch.multiple(SharedReduction, start=started, wait=waited)


@pytest.mark.parametrize(("world", "accumulate"), PAIRS)
def test_a_dropped_bucket(ranks: RankPool, world: int, accumulate: int) -> None:
    strategy = DDPStrategy(bucket_cap_mb=1e-4)
    bucket = set(Reducer(Plain().double().named_parameters(), bucket_cap_mb=1e-4).plan()[1])
    assert bucket < EVERY
    report = report_with(ranks, bucket_1_is_not_reduced, world=world, strategy=strategy, accumulate=accumulate)
    worst = report.first[0]
    assert (worst.step, worst.what, worst.ranks) == (0, "gradient", tuple(range(world)))
    assert names(report) == bucket
    assert worst.size > 1e-3
    assert "not reduced" in report.cause
    assert all(name in report.cause for name in bucket)


# -- mean of means


def ranks_weigh_the_same() -> AbstractContextManager[Any]:
    def shares(mine: Any, total: float, size: int) -> list[tuple[float, float]]:
        return [(float(weight), 1 / len(mine)) for weight in mine]

    return patch.object(feed, "weigh", shares)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("length", "world", "accumulate", "step"),
    [(23, 2, 1, 2), (13, 3, 1, 1), (23, 2, 3, 0), (23, 1, 3, 1)],
    ids=["uneven tail", "empty shares", "within a window", "one process"],
)
def test_mean_of_means(ranks: RankPool, length: int, world: int, accumulate: int, step: int) -> None:
    report = report_with(ranks, ranks_weigh_the_same, length=length, world=world, accumulate=accumulate)
    worst = report.first[0]
    assert (worst.step, worst.what, worst.ranks) == (step, "gradient", tuple(range(world)))
    assert names(report) == EVERY
    assert report.cause.startswith("mean of means")


# -- a rank's weight off by one


def rank_1_weighs_one_more() -> AbstractContextManager[Any]:
    iterate = Window.__iter__

    def iterated(self: Window) -> Iterator[tuple[Any, float, float]]:
        off = 1 if dist.is_initialized() and dist.get_rank() == 1 else 0  # no group: the one process before
        for batch, weight, share in iterate(self):
            yield batch, weight, share * (weight + off) / weight

    return patch.object(Window, "__iter__", iterated)


@pytest.mark.parametrize(("world", "accumulate"), PAIRS)
def test_a_weight_off_by_one(ranks: RankPool, world: int, accumulate: int) -> None:
    report = report_with(ranks, rank_1_weighs_one_more, world=world, accumulate=accumulate)
    worst = report.first[0]
    assert (worst.step, worst.what, worst.ranks) == (0, "gradient", tuple(range(world)))
    assert names(report) == EVERY
    assert report.cause.startswith("weights")


def rank_1_counts_one_more() -> AbstractContextManager[Any]:
    weight = Weighted.weight

    def weighed(self: Weighted, count: Tensor) -> Tensor:
        return weight(self, count) + (self.global_rank == 1 and self.trainer.world_size > 1)

    return patch.object(Weighted, "weight", weighed)


def test_a_steps_own_weight_off_by_one(ranks: RankPool) -> None:
    report = report_with(ranks, rank_1_counts_one_more, Weighted, accumulate=3)
    assert report.first[0].step == 0
    assert report.first[0].what == "gradient"
    assert report.cause.startswith("weights")


# -- clipping by the local norm


def clip_then_reduce(algorithm: str) -> AbstractContextManager[Any]:
    backward = DDPStrategy.backward

    def clipped(self: DDPStrategy, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        due, self.sync_gradients = self.sync_gradients, False
        backward(self, loss, *args, **kwargs)
        self.sync_gradients = due
        if due:
            clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
            clip(self.module.parameters(), CLIP["gradient_clip_val"])
            self.skip()

    return patch.object(DDPStrategy, "backward", clipped)


@pytest.mark.parametrize(
    ("algorithm", "accumulate"),
    [
        ("norm", 1),
        ("value", 3),
        pytest.param("norm", 3, marks=pytest.mark.slow),
        pytest.param("value", 1, marks=pytest.mark.slow),
    ],
)
def test_clipping_before_the_reduction(ranks: RankPool, algorithm: str, accumulate: int) -> None:
    report = report_with(
        ranks,
        lambda: clip_then_reduce(algorithm),
        accumulate=accumulate,
        gradient_clip_algorithm=algorithm,
        **CLIP,
    )
    assert (report.first[0].step, report.first[0].what, report.first[0].ranks) == (0, "gradient", (0, 1))
    assert report.cause.startswith("clipping before the reduction")


def rank_1_clips_by_its_own_norm() -> AbstractContextManager[Any]:
    clip = DDPStrategy.clip

    def clipped(self: DDPStrategy, optimizer: Any, value: float, algorithm: str) -> None:
        clip(self, optimizer, value if self.global_rank == 0 else value / 2, algorithm)

    return patch.object(DDPStrategy, "clip", clipped)


def test_clipping_by_another_norm_on_each_rank(ranks: RankPool) -> None:
    report = report_with(ranks, rank_1_clips_by_its_own_norm, **CLIP)
    assert (report.first[0].step, report.first[0].what, report.first[0].ranks) == (0, "clipped gradient", (1,))
    assert report.cause.startswith("clipping with a different norm on each rank")


def every_rank_clips_by_value() -> AbstractContextManager[Any]:
    clip = DDPStrategy.clip
    return patch.object(DDPStrategy, "clip", lambda self, optimizer, value, _: clip(self, optimizer, value, "value"))


def test_another_clipping(ranks: RankPool) -> None:
    report = report_with(ranks, every_rank_clips_by_value, **CLIP)
    assert (report.first[0].step, report.first[0].what, report.first[0].ranks) == (0, "clipped gradient", (0, 1))
    assert report.cause.startswith("clipping: ")


# -- stale buffers


def buffers_stay() -> AbstractContextManager[Any]:
    return patch.object(buffers, "sync_buffers", lambda *_: None)


@pytest.mark.parametrize("world", [2, 3])
def test_a_stale_buffer(ranks: RankPool, world: int) -> None:
    """The first forward runs with the buffers that were handed out at the start; after it they part."""
    report = report_with(ranks, buffers_stay, Running, world=world)
    worst = report.first[0]
    assert (worst.step, worst.what, worst.name) == (1, "buffer", "running")
    assert worst.ranks == tuple(range(1, world))
    assert worst.size > 0.1
    assert report.cause.startswith("stale buffers")
    strayed = {difference.name for difference in report.differences if difference.what == "gradient"}
    assert strayed == EVERY  # the loss uses the buffer


# -- others that the harness must tell apart from these


def ranks_keep_their_own_start() -> AbstractContextManager[Any]:
    return patch.object(ddp, "broadcast_module_state", lambda *_: None)


def test_ranks_that_start_from_their_own_parameters(ranks: RankPool) -> None:
    report = report_with(ranks, ranks_keep_their_own_start)
    assert (report.first[0].step, report.first[0].what, report.first[0].ranks) == (0, "first parameter", (1,))
    assert "rank 0's parameters" in report.cause


def rank_1_leaves_a_step_out() -> AbstractContextManager[Any]:
    step = DDPStrategy.step
    calls: list[None] = []

    def stepped(self: DDPStrategy, optimizer: Any, closure: Any = None, **options: Any) -> Any:
        calls.append(None)
        return None if self.global_rank == 1 and len(calls) == 3 else step(self, optimizer, closure, **options)

    return patch.object(DDPStrategy, "step", stepped)


def test_an_update_that_is_left_out(ranks: RankPool) -> None:
    report = report_with(ranks, rank_1_leaves_a_step_out)
    assert (report.first[0].step, report.first[0].what, report.first[0].ranks) == (2, "parameter", (1,))
    assert report.cause.startswith("the optimizer step")


def zeros_for_none() -> AbstractContextManager[Any]:
    backward = DDPStrategy.backward

    def filled(self: DDPStrategy, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, loss, *args, **kwargs)
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    return patch.object(DDPStrategy, "backward", filled)


def test_zeros_in_place_of_no_gradient(ranks: RankPool) -> None:
    report = report_with(ranks, zeros_for_none, Sometimes, length=23, batch_size=2)
    assert names(report) == {"rare.weight", "rare.bias"}
    assert report.first[0].size == float("inf")
    assert "exists in only one of the runs" in str(report)
