"""Several training loaders side by side: cycled, weighed, resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.data.feed import Feed
from tests.data.loaders import by_sampler, epoch, feed_of, indices, loader


@pytest.mark.parametrize("size", [1, 2])
def test_several_loaders_cycle_to_the_longest(size: int) -> None:
    feeds = [feed_of({"a": loader(40), "b": loader(10)}, rank, size) for rank in range(size)]
    steps = [epoch(feed, accumulate=2) for feed in feeds]
    assert {feed.num_batches for feed in feeds} == {len(each) for each in steps} == {40 // 4 // size}
    taken = [i for each in steps for batch, _, _ in each for i in indices(batch["a"])]
    assert sorted(taken) == list(range(40))
    turn = {1: 3, 2: 2}[size]  # micro-batches of a pass over "b"
    for start in range(0, 10 // size - turn, turn):
        again = [i for each in steps for batch, _, _ in each[start : start + turn] for i in indices(batch["b"])]
        assert sorted(again) == list(range(10))


def test_a_step_weighs_what_the_heaviest_of_its_batches_weighs() -> None:
    steps = epoch(feed_of([loader(6, 4), loader(14, 2)]), accumulate=7)
    assert [weight for _, weight, _ in steps] == [4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0]
    assert [share for _, _, share in steps] == [weight / 22 for _, weight, _ in steps]


def test_a_cycling_loader_is_shuffled_anew_each_time() -> None:
    steps = epoch(feed_of({"a": loader(40), "b": loader(8)}))
    passes = [[i for batch, _, _ in steps[t : t + 2] for i in indices(batch["b"])] for t in range(0, 10, 2)]
    assert all(sorted(each) == list(range(8)) for each in passes)
    assert len({tuple(each) for each in passes}) > 2


@pytest.mark.parametrize("second", [lambda: loader(10), lambda: by_sampler(10, 4)])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 9])
def test_several_loaders_resume(second: Any, start: int) -> None:
    def steps(start: int) -> list[Any]:
        got = epoch(feed_of([loader(40), second()]), 1, start)
        return [([indices(part) for part in batch], weight, share) for batch, weight, share in got]

    assert steps(start) == steps(0)[start:]


@pytest.mark.parametrize("start", [1, 3, 6])
def test_several_untouched_loaders_resume(start: int) -> None:
    def made() -> Feed:
        return feed_of([loader(32), loader(8)], distribute=False)

    torch.manual_seed(3)
    feed = made()
    whole = [[indices(part) for part in batch] for batch, _, _ in epoch(feed)]
    state = feed.state_dict()
    torch.manual_seed(4)
    resumed = made()
    resumed.load_state_dict(state)
    rest = [[indices(part) for part in batch] for batch, _, _ in epoch(resumed, start=start)]
    # The loader that cycles draws its next pass from the random numbers of training, as it stands then.
    assert [first for first, _ in rest] == [first for first, _ in whole[start:]]
    assert rest[: start % 2] == whole[start:][: start % 2]
