"""Every strategy that holds a model in parts against one process: each precision, accumulation, clipping and length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Blocks, rows
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)

HYBRID = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
"""Replicas and the ranks of a replica, by the number of ranks."""

STRATEGIES: dict[str, tuple[tuple[int, ...], Callable[[int], str | Strategy]]] = {
    "FULL_SHARD": ((1, 2, 3, 4), lambda world: FSDPStrategy(sharding_strategy="FULL_SHARD")),
    "SHARD_GRAD_OP": ((1, 2, 3, 4), lambda world: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")),
    "NO_SHARD": ((1, 2, 3, 4), lambda world: FSDPStrategy(sharding_strategy="NO_SHARD")),
    "HYBRID_SHARD": (
        (1, 2, 3, 4),
        lambda world: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=HYBRID[world]),
    ),
    "fsdp_cpu_offload": ((1, 2, 3, 4), lambda world: "fsdp_cpu_offload"),
    "ddp, sharded optimizer": ((1, 2, 3, 4), lambda world: DDPStrategy(shard_optimizer=True)),
    "1 x 2": ((2,), lambda world: ModelParallelStrategy(1, 2)),
    "2 x 1": ((2,), lambda world: ModelParallelStrategy(2, 1)),
    "2 x 2": ((4,), lambda world: ModelParallelStrategy(2, 2)),
}
"""The numbers of ranks on which a strategy is tried, and what makes it."""

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 2.0},
    "value": {"gradient_clip_val": 2.0, "gradient_clip_algorithm": "value"},
}
# With micro-batches of 2: 24 samples divide for every case; 13 leave one rank of two and of four, and two of three,
# without a sample, and with accumulation whole micro-batches of some; 23 leave parts of other sizes.
LENGTHS = (24, 23, 13)

TOLERANCES = {"64-true": 1e-12, "32-true": 1000 * 2**-24, "bf16-mixed": 18 * 2**-9}
"""By how much a gradient or parameter may differ, as a part of the largest.

In float32, whose unit roundoff is 2**-24: six linear layers with sums of at most 8 products and two norms with two sums
of 7 make 84 roundings in a forward, as many in the backward, and the sum over at most 24 samples and 4 ranks 28 more:
about 200 in a step, and 1,000 in five, in each of which two runs may differ. (Float64's 1e-12 are 9,007 of its own.)

Under bf16-mixed what the linear layers take and give is rounded to bfloat16, whose unit roundoff is 2**-9: input,
weight and output of six layers, forward and backward, 36 times. In the first step two runs differ in the last of these
alone, as each rank rounds the weights' gradients of its own samples; from the second step on weights differ, and any of
the 36 may fall to the other side. Independent ones add up to 6 in the mean: 18 are three standard deviations.
"""

Case = tuple[int, str, int]
"""Accumulated micro-batches, clipping, length."""

CASES: list[Case] = list(itertools.product((1, 3), CLIPPING, LENGTHS))
PLACES = [
    (strategy, world, precision)
    for strategy, (worlds, _) in STRATEGIES.items()
    for world in worlds
    for precision in TOLERANCES
]


def compare(strategy: str, precision: str, cases: list[Case]) -> list[EquivalenceReport]:
    """The reports on a strategy, in all ranks of a pool."""
    world = dist.get_world_size()
    return [
        check_equivalence(
            Blocks,
            rows(length),
            strategy=STRATEGIES[strategy][1](world),
            devices=world,
            batch_size=2,
            accumulate=accumulate,
            precision=precision,
            tolerance=TOLERANCES[precision],
            **CLIPPING[clip],
        )
        for accumulate, clip, length in cases
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "world", "precision"), PLACES)
def test_every_strategy_is_one_process_everywhere(ranks: RankPool, strategy: str, world: int, precision: str) -> None:
    for reports in ranks(world).run(compare, strategy, precision, CASES, timeout=280):
        for report in reports:
            assert report, report


def draw(seed: int) -> list[tuple[str, int, str, Case]]:
    """Of each strategy one case, and each precision three times."""
    source = random.Random(seed)
    precisions = [*TOLERANCES] * 3
    source.shuffle(precisions)
    return [
        (strategy, source.choice(worlds), precision, source.choice(CASES))
        for (strategy, (worlds, _)), precision in zip(STRATEGIES.items(), precisions, strict=True)
    ]


@pytest.mark.parametrize(("strategy", "world", "precision", "case"), draw(seed=13))
def test_every_strategy_is_one_process(ranks: RankPool, strategy: str, world: int, precision: str, case: Case) -> None:
    """A sample of what the slow test tries."""
    for (report,) in ranks(world).run(compare, strategy, precision, [case]):
        assert report, report
