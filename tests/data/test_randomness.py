"""Random numbers in data sets: a function of (seed, epoch, position), apart from those of training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.data.loaders import Augmented, AugmentedBatches, epoch, feed_of, noisy_collate


def samples(feed: Any, number: int = 0, start: int = 0) -> Tensor:
    return torch.cat([batch.reshape(-1, batch.shape[-1]) for batch, _, _ in epoch(feed, number, start)])


def augmented(kind: type[Augmented] = Augmented, batch_size: int | None = 4, **arguments: Any) -> DataLoader[Any]:
    if batch_size is not None:
        arguments.setdefault("collate_fn", noisy_collate)
    return DataLoader(kind(22), batch_size=batch_size, shuffle=True, **arguments)


@pytest.mark.everyday(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [Augmented, AugmentedBatches])
@pytest.mark.parametrize("batch_size", [4, None])
def test_workers_draw_what_one_process_draws(kind: type[Augmented], batch_size: int | None) -> None:
    here = samples(feed_of(augmented(kind, batch_size)), 3)
    assert here[:, 1:].unique().numel() == here[:, 1:].numel()
    in_workers = feed_of(augmented(kind, batch_size, num_workers=2))
    assert here.equal(samples(in_workers, 3))
    assert not here.equal(samples(in_workers, 4))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumed_draws_the_same_numbers(workers: int) -> None:
    whole = samples(feed_of(augmented(num_workers=workers)), 2)
    assert samples(feed_of(augmented(num_workers=workers)), 2, start=3).equal(whole[12:])


def test_numbers_follow_the_position_whatever_the_ranks() -> None:
    made = augmented(collate_fn=default_collate)
    alone = {tuple(sample) for sample in samples(feed_of(made)).tolist()}
    steps = [step for rank in range(2) for step in epoch(feed_of(made, rank, 2))]
    shared = [tuple(sample) for batch, weight, _ in steps if weight for sample in batch.tolist()]
    assert len(shared) == 22
    # A seed stands for a position, and a position for the same sample on one process and on two.
    assert set(shared) == alone


@pytest.mark.timeout(60)
def test_persistent_workers_live_on_and_end_with_the_feed() -> None:
    class Pid(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index, torch.utils.data.get_worker_info().seed, torch.rand(()).item()])

    feed = feed_of(DataLoader(Pid(16), 4, shuffle=True, num_workers=2, persistent_workers=True))
    first, second = samples(feed, 0), samples(feed, 1)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(16))
    assert first[:, 1].unique().equal(second[:, 1].unique())
    assert not first[:, 2].equal(second[:, 2])
    feed.begin(2)
    next(iter(next(feed.windows(1))))
    feed.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_does_not_touch_the_random_numbers_of_training(workers: int) -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), np.random.randn()]

    def played(feed: Any) -> list[list[float]]:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        np.random.randn()  # leaves one half of a pair behind
        return [draws() for _ in feed]

    feed = feed_of(augmented(num_workers=workers))
    feed.begin(0)
    assert played(window_batch for window in feed.windows(2) for window_batch in window) == played(range(6))
