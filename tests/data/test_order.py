"""The order of data: a bijection, a real shuffle, fresh each epoch, quick and small at any length."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data.order import SMALL, Feistel, Shuffled, make_key, mix, table


def cells(values: Tensor, count: int, bins: int) -> Tensor:
    """Which of ``bins`` cells each of the values in ``range(count)`` falls into."""
    return values * bins // count


def deviation(counts: Tensor, probabilities: Tensor, freedom: int) -> float:
    """Standard deviations between the chi-square statistic of counts and its mean."""
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_both_kinds_are_permutations(n: int, seed: int) -> None:
    for kind in (table, Feistel):
        assert sorted(kind(n, make_key(seed))(torch.arange(n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [SMALL - 1, SMALL, SMALL + 1, 99_991, 2**18])
def test_shuffled_is_a_permutation_on_both_sides_of_the_border(n: int) -> None:
    assert Shuffled(n, make_key(n))(torch.arange(n)).sort().values.equal(torch.arange(n))


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_short_orders_reach_every_permutation_about_equally_often(n: int) -> None:
    positions = torch.arange(n)
    seen = Counter(tuple(Shuffled(n, make_key(seed, 0))(positions).tolist()) for seed in range(10_000))
    assert len(seen) == math.factorial(n)
    counts = torch.tensor(list(seen.values()), dtype=torch.float64)
    assert abs(deviation(counts, torch.full_like(counts, 1 / counts.numel()), counts.numel() - 1)) < 5


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("kind", "n"), [(table, 7), (table, 100), (table, 4097), (Feistel, 100), (Feistel, 4097), (Feistel, 70_001)]
)
def test_no_index_prefers_a_position_or_a_neighbour(kind: Any, n: int) -> None:
    bins, seeds = (n, 1000) if n <= 100 else (64, 60)
    positions = torch.arange(n)
    place = torch.bincount(cells(positions, n, bins)).double() / n
    step = torch.bincount(cells(torch.arange(n - 1), n - 1, bins - 1)).double() / (n - 1)
    pairs, steps = torch.zeros(bins * bins, dtype=torch.float64), torch.zeros(bins - 1, dtype=torch.float64)
    for seed in range(seeds):
        order = kind(n, make_key(seed, 3))(positions)
        pair = cells(positions, n, bins) * bins + cells(order, n, bins)
        pairs += torch.bincount(pair, minlength=bins * bins)
        apart = (order[1:] - order[:-1]).remainder(n) - 1
        steps += torch.bincount(cells(apart, n - 1, bins - 1), minlength=bins - 1)
    # Rows and columns of a permutation's table are full: the freedom is that of its interior.
    assert abs(deviation(pairs, torch.outer(place, place).reshape(-1), (bins - 1) ** 2)) < 5
    assert abs(deviation(steps, step, bins - 2)) < 5


def test_a_bad_shuffle_does_not_pass_as_a_good_one() -> None:
    """The statistics above must be able to fail: a rotation by the seed prefers one neighbour."""
    n, steps = 100, torch.zeros(98, dtype=torch.float64)
    for seed in range(50):
        order = (torch.arange(n) + seed).remainder(n)
        apart = (order[1:] - order[:-1]).remainder(n) - 1
        steps += torch.bincount(cells(apart, n - 1, 98), minlength=98)
    assert deviation(steps, torch.full_like(steps, 1 / 98), 97) > 100


def test_positions_past_the_end_go_on_into_fresh_permutations() -> None:
    order = Shuffled(50, make_key(4))
    whole = order(torch.arange(150)).view(3, 50)
    assert whole.sort(dim=1).values.equal(torch.arange(50).expand(3, 50))
    assert len({tuple(row.tolist()) for row in whole}) == 3
    assert order(torch.tensor([149, 0])).tolist() == [whole[2, 49].item(), whole[0, 0].item()]


def test_a_key_is_the_same_on_every_machine_and_differs_by_part() -> None:
    assert make_key(42, "train", 0) == 0x9E753EC7D969CD11
    assert len({make_key(1, 2), make_key(2, 1), make_key(12), make_key(1, "2"), make_key()}) == 5
    assert len({mix(7, position) for position in range(1000)} | {mix(8, position) for position in range(1000)}) == 2000
