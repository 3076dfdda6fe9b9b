"""Loaders that write each batch into the same memory: what is read ahead is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.feed import Feed
from lockstep.data.source import Replicas


class Ring:
    """Gives ``count`` batches of ``slots`` memories in turn."""

    def __init__(self, count: int, slots: int = 1, as_array: bool = False) -> None:
        self.count, self.as_array = count, as_array
        self.memory = [np.zeros(2) for _ in range(slots)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            memory = self.memory[number % len(self.memory)]
            memory[:] = number
            yield {"x": memory if self.as_array else torch.from_numpy(memory)}


class InStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Ring(7))


def played(feed: Feed, accumulate: int, epoch: int = 0) -> list[int]:
    feed.begin(epoch)
    return [int(batch["x"][0]) for window in feed.windows(accumulate) for batch, _, _ in window]


@pytest.mark.everyday
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "loader",
    [
        lambda: Ring(7),
        lambda: Ring(7, as_array=True),
        lambda: Ring(7, slots=3),
        lambda: DataLoader(InStream(), batch_size=None),
    ],
)
def test_a_batch_that_was_read_ahead_had_the_next_ones_numbers(loader: Callable[[], Any], accumulate: int) -> None:
    feed = Feed.train(loader(), replicas=Replicas(), seed=1)
    for epoch in range(2):
        assert played(feed, accumulate, epoch) == [*range(7)]


def test_batches_in_memory_of_their_own_are_handed_out_as_they_are() -> None:
    batches = [{"x": torch.full((2,), number)} for number in range(5)]
    feed = Feed.train(batches, replicas=Replicas(), seed=1)
    for epoch in range(2):
        feed.begin(epoch)
        handed = [batch for window in feed.windows(2) for batch, _, _ in window]
        assert all(mine is theirs for mine, theirs in zip(handed, batches, strict=True))


def test_a_batch_that_a_step_changes_is_no_memory_that_was_given_again() -> None:
    feed = Feed.train([{"x": torch.full((2,), float(number))} for number in range(4)], replicas=Replicas(), seed=1)
    feed.begin(0)
    for window in feed.windows(1):
        for batch, _, _ in window:
            batch["x"] += 10
    assert not feed._lasting.copies
