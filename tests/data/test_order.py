"""The order of data: a bijection, a real shuffle, fresh each epoch, quick and small at any length."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.data.order import SMALL, Feistel, Shuffled, WithReplacement, make_key, mix, table
from lockstep.loop.data import Feed
from torch.utils.data import DataLoader, Dataset

ORDERS = [pytest.param(table, id="table"), pytest.param(Feistel, id="feistel")]


def chi_square(counts: torch.Tensor) -> float:
    """Standard deviations of the chi-square statistic above its mean, for cells that are all equally likely."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_both_kinds_are_permutations(n: int, seed: int) -> None:
    for kind in (table, Feistel):
        assert sorted(kind(n, make_key(seed))(torch.arange(n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [SMALL - 1, SMALL, SMALL + 1, 99_991, 2**18])
def test_shuffled_is_a_permutation_on_both_sides_of_the_border(n: int) -> None:
    assert Shuffled(n, make_key(n))(torch.arange(n)).sort().values.equal(torch.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**40 + 7, 2**61])
def test_positions_far_apart_stay_in_range_and_apart(n: int) -> None:
    positions = torch.arange(0, n, n // 5000)
    indices = Feistel(n, make_key(1))(positions)
    assert indices.min() >= 0
    assert indices.max() < n
    assert indices.unique().numel() == positions.numel()


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_short_orders_reach_every_permutation_about_equally_often(n: int) -> None:
    seeds = 10_000
    seen = Counter(tuple(Shuffled(n, make_key(seed, 0))(torch.arange(n)).tolist()) for seed in range(seeds))
    assert len(seen) == math.factorial(n)
    assert abs(chi_square(torch.tensor(list(seen.values()), dtype=torch.float64))) < 5


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("n", [7, 100, 4097])
def test_no_index_prefers_a_position_or_a_neighbour(kind: Any, n: int) -> None:
    if kind is Feistel and n == 7:
        pytest.skip("tables serve such lengths: nine cells are too few for a network")
    seeds, bins = (4000, n) if n <= 100 else (300, 64)
    places = torch.zeros(bins, bins, dtype=torch.float64)
    steps = torch.zeros(bins, dtype=torch.float64)
    for seed in range(seeds):
        order = kind(n, make_key(seed, 3))(torch.arange(n))
        places += torch.histogram(
            torch.stack([torch.arange(n), order]).T.double(), bins=[bins, bins], range=[0.0, n, 0.0, n]
        )[0] if False else _pairs(torch.arange(n), order, n, bins)
        differences = (order.roll(-1)[:-1] - order[:-1]).remainder(n)
        steps += torch.bincount((differences - 1) * bins // n, minlength=bins)[:bins]
    cells = _cells(n, bins)
    assert abs(_weighed_chi_square(places, torch.outer(cells, cells))) < 5
    assert abs(_weighed_chi_square(steps, _cells(n - 1, bins, n))) < 5
