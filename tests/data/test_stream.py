"""Iterable data sets: shared over ranks and workers, agreed on batch by batch, resumed by state or by reading."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from lockstep.data.feed import Feed
from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import Meeting, SizedStream, Stream, as_threads, drawn, epoch, feed_of


# Threads share the process' random generators, so these streams draw nothing.
class Quiet(Stream):
    def __iter__(self) -> Any:
        return ((torch.tensor([index, 0.0])) for index in range(self.n))


@given(n=st.integers(3, 40), batch=st.integers(1, 5), size=st.integers(1, 3), accumulate=st.integers(1, 3))
@settings(max_examples=25)
def test_ranks_share_a_stream_and_end_together(n: int, batch: int, size: int, accumulate: int) -> None:
    def play(rank: int, gather: Any) -> Any:
        feed = Feed.train(DataLoader(Quiet(n), batch), replicas=Replicas(rank, size, gather), seed=1)
        feed.begin(0)
        return [(window.size, window.last, list(window)) for window in feed.windows(accumulate)]

    ranks = as_threads(size, play)
    assert len({tuple((count, last) for count, last, _ in windows) for windows in ranks}) == 1
    assert [last for _, last, _ in ranks[0]] == [False] * (len(ranks[0]) - 1) + [True]
    for windows in zip(*ranks, strict=True):
        assert sum(w * share for _, _, steps in windows for _, w, share in steps) == pytest.approx(
            size
            * sum(w * w for _, _, steps in windows for _, w, _ in steps)
            / sum(w for _, _, steps in windows for _, w, _ in steps)
        )
    assert sorted(i for windows in ranks for _, _, steps in windows for i in drawn(steps)) == list(range(n))


def test_a_stream_shorter_than_the_ranks_is_refused_where_each_needs_a_sample() -> None:
    def play(rank: int, gather: Any, padded: bool) -> Any:
        feed = Feed.train(DataLoader(Quiet(2), 1), replicas=Replicas(rank, 3, gather), seed=1, padded=padded)
        return drawn(epoch(feed))

    assert as_threads(3, lambda rank, gather: play(rank, gather, False)) == [[0], [1], []]
    with pytest.raises(MisconfigurationException, match="no samples for rank 2 of 3"):
        as_threads(3, lambda rank, gather: play(rank, gather, True))


def test_one_collective_a_window() -> None:
    meeting = Meeting(1)
    feed = Feed.train(DataLoader(Quiet(20), 2), replicas=Replicas(gather=meeting.of(0)), seed=1)
    before = meeting.calls
    assert len(epoch(feed, accumulate=3)) == 10
    assert meeting.calls - before == 4


@pytest.mark.everyday
@pytest.mark.timeout(60)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("workers", "size"), [(0, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_every_sample_once_over_ranks_and_workers(sharded: bool, workers: int, size: int) -> None:
    taken = []
    for rank in range(size):
        made = DataLoader(Stream(23, sharded), 2, num_workers=workers)
        feed = Feed.train(made, replicas=Replicas(rank, size, lambda tensor: tensor.unsqueeze(0)), seed=1)
        taken += drawn(epoch(feed))
    assert sorted(taken) == list(range(23))


def shard_by_init(worker: int) -> None:
    data = get_worker_info().dataset
    data.begin, data.step = worker, 2


class ShardedByInit(Stream):
    begin, step = 0, 1

    def __iter__(self) -> Any:
        return iter(torch.arange(self.begin, self.n, self.step).unsqueeze(1).expand(-1, 2))


@pytest.mark.timeout(60)
def test_a_worker_init_fn_that_shards_is_heeded() -> None:
    made = DataLoader(ShardedByInit(11), 2, num_workers=2, worker_init_fn=shard_by_init)
    assert sorted(drawn(epoch(feed_of(made)))) == list(range(11))


@pytest.mark.everyday
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_random_numbers_follow_seed_epoch_and_position(workers: int, persistent: bool) -> None:
    def played(feed: Feed, number: int) -> list[list[float]]:
        return sorted(torch.cat([batch for batch, _, _ in epoch(feed, number)]).tolist())

    here = feed_of(DataLoader(Stream(10), 2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    expected = [played(here, number) for number in (0, 1, 5)]
    made = DataLoader(Stream(10), 2, num_workers=workers, persistent_workers=persistent)
    feed = feed_of(made)
    assert [played(feed, number) for number in (0, 1, 5)] == expected
    assert torch.get_rng_state().equal(before)
    assert expected[0] != expected[1]
    feed.close()


class Shuffled(Stream):
    """Shuffles before its first sample, then takes its worker's part."""

    def __iter__(self) -> Any:
        order = torch.randperm(self.n).tolist()
        info = get_worker_info()
        for index in order[info.id :: info.num_workers]:
            yield torch.tensor([index, torch.rand(()).item()])


@pytest.mark.timeout(60)
def test_persistent_workers_that_shard_shuffle_alike_and_as_fresh_ones() -> None:
    def played(feed: Feed, number: int) -> list[list[float]]:
        return torch.cat([batch for batch, _, _ in epoch(feed, number)]).tolist()

    feed = feed_of(DataLoader(Shuffled(11), 2, num_workers=2, persistent_workers=True))
    epochs = [played(feed, number) for number in range(3)]
    feed.close()
    for number, samples in enumerate(epochs):
        assert sorted(int(index) for index, _ in samples) == list(range(11))
        assert len({value for _, value in samples}) >= 10  # the workers' first samples may draw the same number
        assert played(feed_of(DataLoader(Shuffled(11), 2, num_workers=2)), number) == samples


@pytest.mark.everyday(5)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2, 3, 4, 5])
def test_a_stream_without_state_resumes_by_reading_again(workers: int, start: int) -> None:
    def played(start: int) -> list[Any]:
        feed = feed_of(DataLoader(Stream(19), 3, num_workers=workers))
        return [(batch.tolist(), weight, share) for batch, weight, share in epoch(feed, 1, start, accumulate=2)]

    assert played(start) == played(0)[start:]


class Stateful(Stream):
    """Goes on from its state; counts what it is asked for."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.at = 0
        self.asked = 0

    def __iter__(self) -> Any:
        begin, self.at = self.at, 0
        for index in range(begin, self.n):
            self.at = index + 1
            self.asked += 1
            yield torch.tensor([index, torch.rand(()).item()])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("done", [3, 4])
def test_a_stream_with_state_goes_on_without_reading_again(rank: int, done: int) -> None:
    """At a boundary (4 micro-batches in windows of 2) and in the middle of a window (3)."""

    def played(steps: Any) -> list[Any]:
        return [(batch.tolist(), weight) for batch, weight, _ in steps]

    def made(data: Stateful) -> Feed:
        return Feed.train(DataLoader(data, 3), replicas=Replicas(rank, 2, lambda t: t.unsqueeze(0)), seed=1)

    whole = played(epoch(made(Stateful(40)), 1))
    feed = made(Stateful(40))
    feed.begin(1)
    steps = (step for window in feed.windows(2) for step in window)
    assert played(itertools.islice(steps, done)) == whole[:done]
    state, data = feed.state_dict(), Stateful(40)
    resumed = made(data)
    resumed.load_state_dict(state)
    assert played(epoch(resumed, 1, start=done, accumulate=2)) == whole[done:]
    read = 3 * 2 * (done - done % 2)  # of the stream, by the windows that are over
    assert data.asked <= 40 - read + 1


class StatefulLoader(DataLoader[Any]):
    """A loader that keeps a state of its own, as torchdata's does."""

    read, begin = 0, 0

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        for _ in range(self.begin):
            next(iterator)
        self.read, self.begin = self.begin, 0
        for batch in iterator:
            self.read += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]


@pytest.mark.parametrize(
    ("made", "length"),
    [
        (DataLoader(SizedStream(10), 4), 3),
        (DataLoader(SizedStream(10), 4, drop_last=True), 2),
        (DataLoader(SizedStream(10), 4, num_workers=2), 4),
        (DataLoader(SizedStream(10), None), 10),
        (DataLoader(Stream(10), 4), float("inf")),
    ],
)
def test_lengths(made: DataLoader[Any], length: float) -> None:
    assert feed_of(made).num_batches == length


def test_a_stream_is_read_up_to_the_length_it_tells() -> None:
    class Endless(SizedStream):
        def __iter__(self) -> Any:
            return iter(torch.arange(1000).unsqueeze(1).expand(-1, 2))

    assert drawn(epoch(feed_of(DataLoader(Endless(10), 4)))) == list(range(12))
