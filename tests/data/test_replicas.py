"""Replicas: ranks that share a tensor or a pipeline draw the same batches; replicas draw each sample once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.data.feed import EvaluationFeed, Feed
from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import Meeting, Stream, as_threads, drawn, epoch, feed_of, indices, loader, numbers

MAKES = {
    "shuffled": lambda: loader(45, 4),
    # without random numbers, which threads share
    "a sampler": lambda: DataLoader(numbers(45), 4, sampler=range(42, -1, -3)),
    "side by side": lambda: {"a": loader(45, 4), "b": loader(13, 2)},
    "whole batches": lambda: [torch.arange(4), torch.arange(4, 8)],
}


class OwnStream(Stream):
    def __iter__(self) -> Any:  # without random numbers, which threads share
        return (torch.tensor([index, 0.0]) for index in range(self.n))


def on_ranks(play: Any, size: int = 4, split: int = 2) -> list[Any]:
    """``play(replicas)`` on ``size`` ranks of which ``split`` neighbours are a replica.

    Their gathers go over the ranks that have the same place in each replica.
    """
    meetings = [Meeting(size // split) for _ in range(split)]

    def run(rank: int, _: Any) -> Any:
        index, inside = divmod(rank, split)
        return play(Replicas(index, size // split, meetings[inside].of(index)))

    return as_threads(size, run)


def plain(batch: Any) -> Any:
    return {name: indices(part) for name, part in batch.items()} if isinstance(batch, dict) else indices(batch)


def steps_of(feed: Feed, start: int = 0) -> list[Any]:
    return [(plain(batch), weight, float(share)) for batch, weight, share in epoch(feed, 1, start, 2)]


@pytest.mark.parametrize("kind", MAKES)
def test_ranks_of_a_replica_draw_the_same_and_replicas_what_two_ranks_draw(kind: str) -> None:
    """Also where an epoch is resumed."""
    make = MAKES[kind]
    distribute = kind != "whole batches"
    for start in (0, 1, 3) if distribute else (0,):

        def play(replicas: Replicas, start: int = start) -> list[Any]:
            return steps_of(Feed.train(make(), replicas=replicas, seed=42, distribute=distribute), start)

        first, twin, second, other_twin = on_ranks(play)
        assert (first, second) == (twin, other_twin)
        alone = [steps_of(feed_of(make(), rank, 2, distribute=distribute), start) for rank in range(2)]
        assert [first, second] == alone


def test_a_stream_is_shared_out_over_replicas_which_agree_on_its_end() -> None:
    def play(replicas: Replicas) -> list[Any]:
        return steps_of(Feed.train(DataLoader(OwnStream(23), 3), replicas=replicas, seed=1))

    first, twin, second, other_twin = on_ranks(play)
    assert (first, second) == (twin, other_twin)
    assert len(first) == len(second)
    assert sorted(i for samples, weight, _ in first + second if weight for i in samples) == list(range(23))


def evaluated(replicas: Replicas) -> list[int]:
    return [i for batch, *_ in EvaluationFeed.of(loader(24, 4), replicas=replicas, seed=1) for i in indices(batch)]


def trained_by_shares(replicas: Replicas) -> list[int]:
    return drawn(epoch(Feed.train(loader(24, 4), replicas=replicas, seed=1, shares=(3, 1))))


@pytest.mark.parametrize(("play", "counts"), [(evaluated, (12, 12)), (trained_by_shares, (18, 6))])
def test_each_sample_is_evaluated_on_one_replica_and_shares_are_of_replicas(play: Any, counts: Any) -> None:
    first, twin, second, other_twin = on_ranks(play)
    assert (first, second, (len(first), len(second))) == (twin, other_twin, counts)
    assert sorted(first + second) == list(range(24))


def test_replicas_of_several_ranks_need_a_gather_of_their_own(ranks: Any) -> None:
    """That of the default group would count each replica as often as it has ranks."""

    def play() -> None:
        Feed.train(loader(20), replicas=Replicas(0, 3), seed=1)

    with pytest.raises(Exception, match=r"Replicas\(count=3\) does not equal the number of ranks, 2"):
        ranks(2).run(play)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.arange(4), torch.arange(4), True),
        (torch.arange(4), torch.tensor([0, 1, 3, 2]), False),
        (torch.arange(4), torch.arange(4).view(2, 2), False),
        ([torch.tensor(math.nan), "a", 3], [torch.tensor(math.nan), "a", 3], True),
        (np.arange(3), np.arange(3) + 1, False),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.clone(), True),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_the_first_batch_of_a_pass_is_compared_over_a_replica(first: Any, second: Any, same: bool, stage: str) -> None:
    """Ranks whose loader gave other samples trained one model on halves of different batches."""
    meeting = Meeting(2)

    def play(rank: int, gather: Any) -> str:
        batch, last = (first, second)[rank], torch.full((2,), rank)  # nobody compares the later ones
        replicas = Replicas(gather=meeting.of(rank), gather_members=gather)
        feed: Any = (Feed.train if stage == "fit" else EvaluationFeed.of)([batch, last], replicas=replicas, seed=1)
        try:
            drawn_batches = epoch(feed) if stage == "fit" else list(feed)
        except MisconfigurationException as error:
            return str(error)
        assert len(drawn_batches) == 2
        return ""

    name = {"fit": "train", "validate": "val"}[stage]
    for told in as_threads(2, play):
        assert told == "" if same else f"{name}_dataloader yields different samples on ranks" in told


def play_over_groups() -> list[int]:
    """Four ranks, of which two neighbours are a replica, over process groups."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([inside, 2 + inside]) for inside in range(2)]

    def gather(tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(parts, tensor.contiguous(), groups[rank % 2])
        return torch.stack(parts)

    try:
        made = DataLoader(Stream(13), 2)
        return drawn(epoch(Feed.train(made, replicas=Replicas(rank // 2, 2, gather), seed=1)))
    finally:
        torch.distributed.barrier()
        for group in groups:
            torch.distributed.destroy_process_group(group)


@pytest.mark.timeout(60)
def test_replicas_on_real_ranks(ranks: Any) -> None:
    first, twin, second, other_twin = ranks(4).run(play_over_groups)
    assert (first, second) == (twin, other_twin)
    assert sorted(first + second) == list(range(13))
