"""Feeds on real ranks: what they must agree on goes through the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data.feed import Feed
from lockstep.data.source import Replicas
from tests.data.loaders import Stream, drawn, epoch, loader

pytestmark = pytest.mark.timeout(60)


def play_stream(n: int, workers: int) -> tuple[int, list[int]]:
    replicas = Replicas(torch.distributed.get_rank(), torch.distributed.get_world_size())
    feed = Feed.train(DataLoader(Stream(n), 2, num_workers=workers), replicas=replicas, seed=1)
    steps = epoch(feed, accumulate=2)
    return len(steps), drawn(steps)


@pytest.mark.parametrize(("n", "workers"), [(13, 0), (9, 2)])
def test_a_stream_ends_on_all_ranks_at_once(ranks: Any, n: int, workers: int) -> None:
    results = ranks(2).run(play_stream, n, workers)
    assert results[0][0] == results[1][0]
    assert sorted(results[0][1] + results[1][1]) == list(range(n))


def play_own_generator() -> list[int]:
    rank = torch.distributed.get_rank()
    made = loader(20, generator=torch.Generator().manual_seed(100 + rank))
    return drawn(epoch(Feed.train(made, replicas=Replicas(rank, 2), seed=1)))


def test_a_generator_that_was_seeded_by_rank_is_taken_from_the_first(ranks: Any) -> None:
    first, second = ranks(2).run(play_own_generator)
    assert sorted(first + second) == list(range(20))


def play_different_lengths(first: int, more: int, batch: int, distribute: bool) -> int:
    rank = torch.distributed.get_rank()
    made = loader(first + more * rank, batch)
    return len(epoch(Feed.train(made, replicas=Replicas(rank, 2), seed=1, distribute=distribute), accumulate=3))


def test_ranks_with_data_of_their_own_end_together(ranks: Any) -> None:
    """The rank that ends first goes on, on padding batches that weigh nothing."""
    assert ranks(2).run(play_different_lengths, 8, 8, 4, False) == [4, 4]


@pytest.mark.parametrize(
    ("first", "more", "batch", "said"),
    [(8, 8, 4, "batches by rank: 1, 2"), (10, 2, 4, "samples by rank: 10, 12"), (9, 1, 2, "samples by rank: 9, 10")],
)
def test_ranks_that_disagree_about_shared_data_are_told(
    ranks: Any, first: int, more: int, batch: int, said: str
) -> None:
    with pytest.raises(Exception, match=rf"train_dataloader is not the same on all ranks \({said}\)"):
        ranks(2).run(play_different_lengths, first, more, batch, True)
