"""Feeds that go on with another number of ranks: whatever the loader is, no sample is lost and none comes twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lockstep.data.counting import Accumulation, BatchCounting, BatchPlan, RunAttempt, batches_of_window, count_batches
from lockstep.data.feed import Feed
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import SizedStream, Stream, by_sampler, feed_of, indices, loader, numbers

Make = Callable[[], Any]


def of_batches(n: int) -> DataLoader[Any]:
    """A loader with a batch sampler of the user's: batches of 3, 1, 2, 3, 1, 2, ... samples."""

    class Uneven(BatchSampler):
        def __iter__(self) -> Any:
            first = 0
            while first < n:
                end = min(n, first + (3, 1, 2)[first % 3])
                yield list(range(first, end))
                first = end

        def __len__(self) -> int:
            return sum(1 for _ in self)

    return DataLoader(numbers(n), batch_sampler=Uneven(SequentialSampler(range(n)), 1, False))


@dataclass
class Life:
    """What the ranks of a life have drawn together, window by window, and where they left off."""

    windows: list[list[int]]
    plan: BatchPlan
    feed: Feed


def play(
    make: Make,
    size: int,
    accumulate: Accumulation = 1,
    *,
    saved: BatchPlan | None = None,
    stop: int | None = None,
    epoch: int = 0,
    pick: Callable[[Any], list[int]] = indices,
    **flags: Any,
) -> Life:
    """One life, rank after rank, for so many windows of an epoch; ``pick`` returns the samples of a batch."""
    keep = flags.pop("keep", True)
    rows = batches_of_window(accumulate, epoch)
    found: list[list[int]] = []
    for rank in range(size):

        def counting(size: int, batches: list[int], flexible: bool, workers: int | None) -> BatchCounting:
            return count_batches(saved, RunAttempt(size, accumulate, batches, flexible, keep=keep, workers=workers))

        planned = None if saved is None else saved.ranks
        feed = feed_of(make(), rank, size, counting=counting, planned=planned, **flags)
        goes_on = saved is not None and not feed.counting.moved  # on the same ranks
        number = saved.at.number if saved is not None and goes_on else feed.counting.done_before(epoch)[0]
        feed.begin(epoch, number, rows)
        try:
            for index, window in enumerate(itertools.islice(feed.windows(rows), stop)):
                number += window.size
                found.extend([] for _ in range(index + 1 - len(found)))
                found[index] += [sample for batch, weight, _ in window if weight for sample in pick(batch)]
        finally:
            feed.close()
    at = feed.reached(number)
    before = feed.counting.resumed_at if feed.counting.done_before(epoch)[0] else None
    return Life(
        [sorted(window) for window in found],
        BatchPlan(feed.counting.ranks, accumulate, feed.batches, size, at, before),
        feed,
    )


def in_all(*lives: Life) -> list[int]:
    """All samples that lives have drawn, in their order."""
    return sorted(sample for life in lives for window in life.windows for sample in window)


def at_once(make: Make, ranks: int, accumulate: int = 1, **flags: Any) -> list[list[int]]:
    """The windows of an epoch that nothing disturbs, on the ranks that planned it."""
    return play(make, ranks, accumulate, **flags).windows


CASES: dict[str, Make] = {
    "a stream": lambda: DataLoader(Stream(61), 4),
    "shuffled": lambda: loader(61, 4),
    "in order, no tail": lambda: loader(61, 4, shuffle=False, drop_last=True),
    "one by one": lambda: loader(61, None),
    "with replacement": lambda: DataLoader(numbers(61), 4, sampler=RandomSampler(numbers(61), True, 50)),
    "a sampler": lambda: by_sampler(61, 4),
    "batches": lambda: of_batches(61),
}


@pytest.mark.everyday
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("before", "after", "accumulate"), [(4, 2, 1), (1, 3, 2), (2, 4, 3)])
def test_the_windows_stay_the_same(kind: str, before: int, after: int, accumulate: int) -> None:
    whole = at_once(CASES[kind], before, accumulate)
    first = play(CASES[kind], before, accumulate, stop=2)
    second = play(CASES[kind], after, accumulate, saved=first.plan)
    assert first.windows + second.windows == whole
    next_epoch = play(CASES[kind], after, accumulate, saved=first.plan, epoch=1)
    assert next_epoch.windows == at_once(CASES[kind], before, accumulate, epoch=1)


@pytest.mark.parametrize("kind", CASES)
def test_several_moves_in_one_epoch(kind: str) -> None:
    make = CASES[kind]
    found: list[list[int]] = []
    plan = None
    for size, stop in ((4, 1), (3, 1), (4, 1), (1, None)):
        life = play(make, size, 1, saved=plan, stop=stop)
        found += life.windows
        plan = BatchPlan.load(life.plan.state_dict())
        assert (plan.ranks, plan.size) == (4, size)
    assert found == at_once(make, 4)


def test_the_permutation_of_several_processes_is_kept_by_one() -> None:
    """One process alone draws torch's permutation from its own random numbers."""
    make = CASES["shuffled"]
    first = play(make, 3, stop=2, order="torch")
    for size in (1, 2):
        second = play(make, size, saved=first.plan, order="torch")
        assert first.windows + second.windows == at_once(make, 3, order="torch")


@pytest.mark.parametrize("limit", [3, 0.5])
def test_limits_count_batches_of_the_plan(limit: float) -> None:
    make, limits = CASES["shuffled"], {"limit": limit}
    first = play(make, 2, 2, stop=1, **limits)
    for size in (1, 3, 4):
        second = play(make, size, 2, saved=first.plan, **limits)
        assert first.windows + second.windows == at_once(make, 2, 2, **limits)
        assert second.feed.rows == (3 if limit == 3 else 4)
        assert second.feed.rows_at(int(second.feed.num_batches)) == second.feed.rows


def test_a_schedule_of_accumulation_is_scaled_epoch_by_epoch() -> None:
    make, schedule = CASES["shuffled"], {0: 1, 2: 3}
    first = play(make, 2, schedule, stop=2)
    for epoch, rows in ((0, 1), (1, 1), (2, 3)):
        second = play(make, 3, schedule, saved=first.plan, epoch=epoch)
        whole = at_once(make, 2, rows, epoch=epoch)
        assert second.windows == (whole[2:] if epoch == 0 else whole)
        assert second.feed.counting.micro(rows) == (1 if rows == 1 else 2)


@pytest.mark.parametrize(
    ("ranks", "workers"), [(1, 0), (4, 0), (3, 0), (3, 2), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_a_stream_goes_on_where_its_ranks_and_workers_have_stopped(ranks: int, workers: int) -> None:
    """Workers draw ahead of each other: what was drawn is no leading part of the stream."""
    before = 2 if workers == 2 else 0

    def make(workers: int, sized: bool = False) -> Any:
        return DataLoader((SizedStream if sized else Stream)(47), 3, num_workers=workers)

    first = play(lambda: make(before), 2, 2, stop=2)
    second = play(lambda: make(workers, ranks == 1), ranks, 2, saved=first.plan)
    assert in_all(first, second) == list(range(47))


def test_a_stream_that_shards_itself_over_workers_goes_on() -> None:
    def make() -> Any:
        return DataLoader(Stream(47, sharded=True), 3, num_workers=2)

    first = play(make, 2, 2, stop=2)
    second = play(make, 4, 2, saved=first.plan)
    assert in_all(first, second) == list(range(47))


def test_several_loaders_go_on_together() -> None:
    def make() -> Any:
        return {"long": loader(64, 4), "short": loader(24, 2)}  # 4 and 3 batches of 4 ranks

    for name in ("long", "short"):
        pick = lambda batch, name=name: indices(batch[name])  # noqa: E731
        first = play(make, 4, stop=1, pick=pick)
        assert first.plan.batches == [4, 2]
        for size in (1, 2, 3):
            second = play(make, size, saved=first.plan, pick=pick)
            assert first.windows + second.windows == at_once(make, 4, pick=pick)


# -- what the user has changed, and what cannot be -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffled", "a sampler"])
@pytest.mark.parametrize(("size", "accumulate", "batch"), [(4, 2, 4), (2, 1, 5), (4, 1, 16), (4, 3, 4), (1, 1, 4)])
def test_what_the_user_has_changed_holds_and_loses_no_sample(kind: str, size: int, accumulate: int, batch: int) -> None:
    """On as many ranks, too, another ``batch_size`` in mid-epoch skipped samples or read them again."""

    def make(batch: int) -> Any:
        return loader(61, batch) if kind == "shuffled" else by_sampler(61, batch)

    first = play(lambda: make(4), 4, 1, stop=2)
    second = play(lambda: make(batch), size, accumulate, saved=first.plan, keep=(size, accumulate, batch) != (1, 1, 4))
    assert in_all(first, second) == in_all(play(lambda: make(4), 1))
    assert {len(window) for window in second.windows[:-1]} <= {size * accumulate * batch}
    assert second.plan.ranks == size


def test_whole_batches_that_do_not_divide_are_refused_with_the_numbers() -> None:
    def make() -> Any:
        return DataLoader(Stream(64), 1)

    first = play(make, 4, {0: 3, 2: 2}, stop=1)
    said = r"The 8 batches of a step \(4 ranks x accumulate_grad_batches=2\) cannot be .* over 3 .* 1, 2, 4, 8;"
    with pytest.raises(MisconfigurationException, match=said):
        play(make, 3, {0: 3, 2: 2}, saved=first.plan)
    assert in_all(first, play(make, 3, 1, saved=first.plan)) == list(range(64))


def test_what_is_taken_as_it_is_goes_on_by_its_batches() -> None:
    def make() -> Any:
        return loader(48, 4, shuffle=False)

    first = play(make, 4, 1, stop=1, distribute=False)
    with pytest.raises(MisconfigurationException, match="cannot be divided evenly"):
        play(make, 3, 1, saved=first.plan, distribute=False)
    second = play(make, 2, 1, saved=first.plan, distribute=False)
    assert second.feed.counting.micro(1) == 2
    assert second.windows[0] == sorted(2 * [*range(8, 16)])  # both ranks read on after two batches of their own


@pytest.mark.parametrize("schedule", [{0: 2}, {0: 2, 3: 2}])
def test_a_schedule_that_says_the_same_is_no_change(schedule: dict[int, int]) -> None:
    first = play(CASES["shuffled"], 4, 2, stop=1)
    assert play(CASES["shuffled"], 2, schedule, saved=first.plan, stop=1).plan.ranks == 4
    assert play(CASES["shuffled"], 2, {**schedule, 5: 1}, saved=first.plan, stop=1).plan.ranks == 2
