"""What a rank does to draw its part must not grow with the number of ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler

from lockstep.data.counting import BatchCounting
from tests.data.loaders import feed_of, numbers
from tests.tools.scale import InOrder

GLOBAL_BATCHES = 6


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's, whose last batch is smaller."""

    def __init__(self, length: int) -> None:
        self.batches = [[i, i + 1] for i in range(0, length - 1, 2)]
        self.batches[-1] = self.batches[-1][:1]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def plain(length: int) -> DataLoader[Any]:
    return DataLoader(numbers(length), 2, sampler=InOrder(length))


def in_batches(length: int) -> DataLoader[Any]:
    return DataLoader(numbers(length), batch_sampler=Pairs(length))


def calls(make: Any, size: int, planned: int | None = None) -> int:
    """Calls of functions, Python's own among them, while the middle rank draws an epoch."""
    # the last global batch is not full, and no number of ranks divides the windows of a plan of 3
    length = GLOBAL_BATCHES * size * 2 - 1
    counting = {} if planned is None else {"counting": lambda of, *rest: BatchCounting(planned, of)}
    feed = feed_of(make(length), size // 2, size, **counting)
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what it calls for other tests' garbage is not the feed's
    sys.setprofile(count)
    try:
        feed.begin(0)
        drawn = [batch for window in feed.windows(1) for batch, _, _ in window]
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(drawn) >= GLOBAL_BATCHES
    return found


@pytest.mark.parametrize("make", [plain, in_batches])
def test_a_user_s_sampler_costs_a_rank_no_more_calls_among_many(make: Any) -> None:
    """It was 11 calls for each rank and micro-batch: 18 ms at 10,000 ranks."""
    calls(make, 512)  # what is done once
    assert calls(make, 4096) <= calls(make, 512) + 10


def test_nor_does_a_window_that_other_ranks_have_planned() -> None:
    few, many = (calls(plain, size, planned=size + size // 2) for size in (512, 4096))
    assert many <= few + 10
