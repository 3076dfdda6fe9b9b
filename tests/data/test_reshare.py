"""Shares that change while an epoch runs: each sample once, the same samples in each step, wherever loaders are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lockstep.data.counting import BatchCounting, BatchPlan, RunAttempt, count_batches
from lockstep.data.feed import Feed
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import Stream, by_sampler, feed_of, indices, loader, numbers
from tests.data.test_shares import batch_sampler

Step = list[tuple[list[int], float, float]]
"""The micro-batches of a window on a rank: samples, weight, share."""
SHARES = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 9), min_size=3, max_size=3)), max_size=4)


def play(feeds: list[Feed], accumulate: int, changes: Any = (), start: int = 0, epoch: int = 0) -> list[list[Step]]:
    """The windows of an epoch on all ranks, shares being changed after some of them, as soon as can be."""
    for feed in feeds:
        feed.begin(epoch, start, accumulate)
    found: list[list[Step]] = []
    for windows in zip(*(feed.windows(accumulate) for feed in feeds), strict=True):
        assert len({(window.size, window.last, tuple(window.of_rank)) for window in windows}) == 1
        steps = [[(indices(b) if weight else [], weight, share) for b, weight, share in window] for window in windows]
        mine = [sum(len(samples) for samples, _, _ in step) for step in steps]
        assert windows[0].num_done or mine == list(windows[0].of_rank)
        found.append(steps)
        for _, shares in (change for change in changes if change[0] == len(found)):
            number = max(feed.drawn for feed in feeds)
            assert len({feed.reshare(shares, number) for feed in feeds}) == 1
    return found


def of(make: Any, size: int = 3, **arguments: Any) -> list[Feed]:
    return [feed_of(make(), rank, size, reshared=True, **arguments) for rank in range(size)]


def samples_of(steps: list[list[Step]]) -> list[list[int]]:
    """The samples of each window, of all ranks together."""
    return [sorted(i for step in window for samples, _, _ in step for i in samples) for window in steps]


@pytest.mark.parametrize("make", [loader, by_sampler])
@given(n=st.integers(30, 90), batch=st.integers(2, 5), accumulate=st.integers(1, 3), changes=SHARES)
@settings(max_examples=15)
def test_each_step_has_its_samples_once_and_their_mean(
    make: Any, n: int, batch: int, accumulate: int, changes: Any
) -> None:
    found = play(of(lambda: make(n, batch)), accumulate, changes)
    assert samples_of(found) == samples_of(play(of(lambda: make(n, batch)), accumulate))
    for window in found:
        samples = [float(i) for step in window for each, _, _ in step for i in each]
        averaged = sum(torch.tensor(i).double().mean() * share for step in window for i, w, share in step if w) / 3
        torch.testing.assert_close(averaged, torch.tensor(samples).double().mean(), rtol=1e-12, atol=1e-12)


def parts_of(steps: list[list[Step]]) -> list[list[int]]:
    """How many samples each rank takes of each window."""
    return [[sum(len(samples) for samples, _, _ in step) for step in window] for window in steps]


def test_new_shares_hold_from_the_next_window_that_nobody_has_drawn() -> None:
    found = parts_of(play(of(lambda: loader(60, 4), 2), 1, [(2, (6, 2)), (5, (1, 1))]))
    assert found == [[4, 4]] * 2 + [[6, 2]] * 3 + [[4, 4]] * 2 + [[2, 2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_a_part_of_the_last_window_may_get_one(workers: int) -> None:
    """Its sampler had ended, and the loader was asked for one more micro-batch."""

    def made() -> Any:
        return DataLoader(numbers(50), 4, num_workers=workers)

    feeds = of(made)
    found = play(feeds, 1, [(4, (1, 1, 2))])
    for feed in feeds:
        feed.close()
    assert samples_of(found) == [list(range(i, min(i + 12, 50))) for i in range(0, 50, 12)]
    assert parts_of(found)[4] == [1, 1, 0] if workers else [1, 0, 1]


def test_new_shares_hold_behind_what_loader_workers_have_drawn() -> None:
    """One rank prefetches six micro-batches, the other none: the cut is the same on both."""
    makes = [lambda: DataLoader(numbers(96), 4, num_workers=2, prefetch_factor=3), lambda: loader(96, 4, shuffle=False)]
    feeds = [feed_of(make(), rank, 2, reshared=True) for rank, make in enumerate(makes)]
    found = play(feeds, 1, [(2, (6, 2))])
    for feed in feeds:
        feed.close()
    assert parts_of(found) == [[4, 4]] * 8 + [[6, 2]] * 4
    assert samples_of(found) == [list(range(i, i + 8)) for i in range(0, 96, 8)]


def test_a_loader_that_has_drawn_a_micro_batch_refuses_to_cut_it_anew() -> None:
    feed = feed_of(loader(40, 4), 0, 2, reshared=True)
    feed.begin(0)
    next(iter(next(feed.windows(1))))
    with pytest.raises(RuntimeError, match="micro-batch 0 has been drawn"):
        feed.reshare((3, 1), 0)


# -- a run that goes on


@pytest.mark.everyday
@pytest.mark.parametrize("make", [loader, by_sampler])
@pytest.mark.parametrize("start", [1, 3, 5, 6, 8])
def test_an_epoch_resumed_goes_on_with_its_shares(make: Any, start: int) -> None:
    """Inside a window, too, whose first micro-batches were cut by the shares of then."""
    feeds = of(lambda: make(130, 4), 3)
    whole = play(feeds, 2, [(1, (6, 4, 2)), (3, (1, 2, 3))])
    again = of(lambda: make(130, 4), 3)
    for feed, resumed in zip(feeds, again, strict=True):
        resumed.load_shares(feed.shares_state() or {}, start)
    rest = play(again, 2, start=start)
    flat, flat_rest = ([list(zip(*window, strict=True)) for window in steps] for steps in (whole, rest))
    assert list(itertools.chain(*flat_rest)) == list(itertools.chain(*flat))[start:]


def test_a_run_goes_on_with_other_ranks_whose_shares_change_too() -> None:
    def life(size: int, saved: BatchPlan | None, stop: int, changes: Any) -> tuple[list[list[int]], BatchPlan]:
        def counting(size: int, batches: list[int], flexible: bool, workers: int | None) -> BatchCounting:
            return count_batches(saved, RunAttempt(size, 1, batches, flexible))

        feeds = of(lambda: loader(113, 4), size, counting=counting, planned=3)
        first = feeds[0].counting.done_before(0)[0]
        found = play(feeds, 1, changes, first)[:stop]
        number = first + sum(len(window[0]) for window in found)
        found_plan = BatchPlan(feeds[0].counting.ranks, 1, feeds[0].batches, size, feeds[0].reached(number))
        origin = feeds[0].counting.resumed_at
        return samples_of(found), dataclasses.replace(found_plan, resumed_at=origin)

    whole, _ = life(3, None, 99, ())
    first, plan = life(3, None, 4, [(1, (6, 4, 2))])
    second, plan = life(2, plan, 3, [(1, (9, 3))])
    assert first + second + life(4, plan, 99, [(1, (1, 2, 4, 5))])[0] == whole


# -- what is refused


@pytest.mark.parametrize("make", [batch_sampler, lambda: DataLoader(Stream(40), 4), lambda: [torch.arange(4)]])
def test_loaders_of_whole_batches_are_refused_by_the_flags_name(make: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Trainer\(balance=True\): train_dataloader yields ready-made"):
        feed_of(make(), 0, 2, reshared=True)
