"""The best cut of a global batch for ranks of unequal speed, and when it is changed: on made-up clocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from lockstep.extensions.balancing.shares import LARGE, Cost, ShareControl, best_parts, bottleneck


def test_the_cut_is_the_best_there_is() -> None:
    """Against all cuts there are, with fixed costs and memory that is short."""
    draw = random.Random(0)
    for _ in range(300):
        size = draw.randint(2, 4)
        total = draw.randint(size, 14)
        costs = []
        for _ in range(size):
            samples, seconds = draw.randint(1, 10), draw.uniform(0.1, 5)
            most = draw.choice([2**62, draw.randint(samples, 20)])
            costs.append(Cost(samples, seconds, seconds * draw.choice([0, 0.3, 0.9]), most))
        if sum(cost.most for cost in costs) < total:
            continue
        parts = best_parts(costs, total)
        ranges = [range(1, min(cost.most, total) + 1) for cost in costs]
        every = [each for each in itertools.product(*ranges) if sum(each) == total]
        assert parts in every
        assert bottleneck(costs, parts) <= min(bottleneck(costs, each) for each in every) * (1 + 1e-9)


Clock = Callable[[int, int, int], float]
"""Seconds of a window at a look, on a rank, with so many samples."""


def run(clock: Clock, looks: int, parts: tuple[int, ...], noise: float = 0.0, seed: int = 0) -> list[tuple[int, ...]]:
    """The shares after each look."""
    draw, control, found = random.Random(seed), ShareControl(len(parts)), []
    for look in range(looks):
        seconds = [clock(look, rank, part) * draw.uniform(1 - noise, 1 + noise) for rank, part in enumerate(parts)]
        move = control.look(seconds, parts)
        parts = parts if move is None else move.after
        found.append(parts)
    return found


@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("fixed", [0.0, 4.0, 12.0])
def test_three_looks_find_the_best_cut_whatever_is_fixed(factor: float, fixed: float) -> None:
    def clock(look: int, rank: int, samples: int) -> float:
        return (factor if rank else 1.0) * (fixed + samples)

    costs = [Cost(16, clock(0, rank, 16), clock(0, rank, 0)) for rank in range(2)]
    best = bottleneck(costs, best_parts(costs, 32))
    found = run(clock, 12, (16, 16))
    assert bottleneck(costs, found[2]) <= best * 1.08
    assert len(set(found[4:])) == 1, found


def test_shares_stay_where_nobody_is_slow() -> None:
    """Whatever the noise of 3 % either way, over 200 looks of each of 20 runs."""
    for seed in range(20):
        found = run(lambda look, rank, samples: 1.0 + samples, 200, (16, 16), noise=0.03, seed=seed)
        assert len(set(found)) == 1, found


def test_a_large_change_is_made_at_once_and_a_small_one_on_the_second_look() -> None:
    control = ShareControl(2)
    assert control.look([1.0, 1 + 2 * LARGE], (32, 32)) is None
    assert control.look([1.0, 1.0], (32, 32)) is None
    small = control.look([1.0, 1.2], (32, 32)), control.look([1.0, 1.2], (32, 32))
    assert small[0] is None
    assert small[1] is not None
    assert ShareControl(2).look([1.0, 2.0], (32, 32)) is not None


@pytest.mark.parametrize("seconds", [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
def test_a_clock_that_stood_still_changes_no_shares(seconds: list[float]) -> None:
    """It divided by zero, in the middle of a fit."""
    assert ShareControl(2).look(seconds, (16, 16)) is None
