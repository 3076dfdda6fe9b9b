"""Training feeds: every sample once over all ranks, equal steps, shares that sum right, resume as if nothing was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.window import Window
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import EveryThird, by_sampler, drawn, epoch, feed_of, indices, loader, numbers

SIZES = {"n": st.integers(1, 60), "batch": st.integers(1, 7), "size": st.integers(1, 4)}


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's: batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epochs: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)

    def __iter__(self) -> Any:
        order = torch.randperm(self.n).tolist()
        size = 1
        while order:
            yield order[:size]
            order, size = order[size:], size % 3 + 1

    def __len__(self) -> int:
        whole, rest = divmod(self.n, 6)
        return 3 * whole + [0, 1, 2, 2, 3, 3][rest]


def plain(n: int, batch: int) -> DataLoader[Any]:
    return loader(n, batch)


def by_batch_sampler(n: int, batch: int) -> DataLoader[Any]:
    return DataLoader(numbers(n), batch_sampler=Pairs(n))


def one_by_one(n: int, batch: int) -> DataLoader[Any]:
    return loader(n, None)


KINDS = {
    plain: lambda n: set(range(n)),
    by_sampler: lambda n: set(range(0, 3 * n, 3)),
    by_batch_sampler: lambda n: set(range(n)),
    one_by_one: lambda n: set(range(n)),
}


# -- every sample once, weighed right


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, accumulate=st.integers(1, 4))
@settings(max_examples=40)
def test_every_sample_once_in_equal_steps(kind: Any, n: int, batch: int, size: int, accumulate: int) -> None:
    feeds = [feed_of(kind(n, batch), rank, size) for rank in range(size)]
    ranks = [epoch(feed, 3, accumulate=accumulate) for feed in feeds]
    samples = [index for steps in ranks for index in drawn(steps)]
    assert len(samples) == len(set(samples))
    assert set(samples) == KINDS[kind](n)
    assert {len(steps) for steps in ranks} == {feeds[0].num_batches}


@given(**SIZES, accumulate=st.integers(1, 4), drop_last=st.booleans())
@settings(max_examples=60)
def test_shares_make_the_mean_over_the_window(n: int, batch: int, size: int, accumulate: int, drop_last: bool) -> None:
    if drop_last and n < batch * size:
        return
    loaders = [loader(n, batch, drop_last=drop_last) for _ in range(size)]
    feeds = [feed_of(each, rank, size) for rank, each in enumerate(loaders)]
    for feed in feeds:
        feed.begin(0)
    seen = 0
    for windows in zip(*(feed.windows(accumulate) for feed in feeds), strict=True):
        assert len({window.size for window in windows}) == 1
        assert len({window.last for window in windows}) == 1
        parts = [list(window) for window in windows]
        values = [torch.tensor([float(i) for i in indices(b)]) for steps in parts for b, weight, _ in steps if weight]
        # What backward sums on each rank and the reducer averages over ranks, of per-batch means.
        averaged = sum(torch.tensor(indices(b)).double().mean() * share for p in parts for b, w, share in p if w) / size
        torch.testing.assert_close(averaged, torch.cat(values).double().mean(), rtol=1e-12, atol=1e-12)
        seen += sum(len(value) for value in values)
    assert windows[0].last
    assert seen == (n // (batch * size) * batch * size if drop_last else n)


def test_equal_micro_batches_have_the_share_of_one_in_so_many_exactly() -> None:
    for size in (1, 3):
        shares = {share for _, _, share in epoch(feed_of(loader(60), 1 % size, size), accumulate=5)}
        assert shares == {0.2}


def test_one_process_that_accumulates_draws_what_ranks_draw() -> None:
    alone = [indices(batch) for batch, _, _ in epoch(feed_of(loader(48)), accumulate=3)]
    shared = [[indices(batch) for batch, _, _ in epoch(feed_of(loader(48), rank, 3))] for rank in range(3)]
    assert alone == [batch for step in zip(*shared, strict=True) for batch in step]


@given(n=SIZES["n"], batch=SIZES["batch"], drop_last=st.booleans())
@settings(max_examples=30)
def test_one_process_has_as_many_batches_as_the_loader_says(n: int, batch: int, drop_last: bool) -> None:
    if drop_last and n < batch:
        return
    made = loader(n, batch, drop_last=drop_last)
    assert feed_of(made).num_batches == len(made) == len(epoch(feed_of(made)))


# -- the order


def test_the_order_follows_seed_epoch_and_place_among_the_loaders() -> None:
    feed = feed_of(loader(50))
    orders = [drawn(epoch(feed, number)) for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert drawn(epoch(feed_of(loader(50), seed=43))) != orders[0]
    pair = epoch(feed_of([loader(50), loader(50)]))
    assert [indices(batch[0]) for batch, _, _ in pair] != [indices(batch[1]) for batch, _, _ in pair]


def test_a_generator_of_the_loader_is_the_key_and_is_not_used_up() -> None:
    def order(own: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(own)
        before = generator.get_state()
        steps = epoch(feed_of(loader(30, generator=generator), seed=seed))
        assert generator.get_state().equal(before)
        return drawn(steps)

    assert order(5, seed=1) == order(5, seed=2) != order(6, seed=1)


def test_samples_drawn_with_replacement_are_a_function_too() -> None:
    data = numbers(20)
    made = DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=33))
    alone = drawn(epoch(feed_of(made)))
    assert len(alone) == 33
    assert set(alone) < set(range(20))
    assert alone == drawn(epoch(feed_of(made)))
    shared = [steps for rank in range(2) for steps in epoch(feed_of(made, rank, 2))]
    assert sorted(drawn(shared)) == sorted(alone)


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, accumulate=st.integers(1, 3), data=st.data())
@settings(max_examples=25)
def test_an_epoch_resumed_goes_on_as_it_would_have(
    kind: Any, n: int, batch: int, size: int, accumulate: int, data: Any
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    whole = epoch(feed_of(kind(n, batch), rank, size), 5, accumulate=accumulate)
    start = data.draw(st.integers(0, len(whole) - 1))  # perhaps in the middle of a window
    rest = epoch(feed_of(kind(n, batch), rank, size), 5, start, accumulate)
    assert [(indices(b), weight, share) for b, weight, share in rest] == [
        (indices(b), weight, share) for b, weight, share in whole[start:]
    ]


# -- torch's order


def test_torch_order_on_one_process_is_the_plain_loaders() -> None:
    made = loader(20)
    torch.manual_seed(3)
    expected = [[indices(batch) for batch in made] for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    feed = feed_of(made, order="torch")
    steps = [epoch(feed, number) for number in range(2)]
    assert [[indices(batch) for batch, _, _ in each] for each in steps] == expected
    assert torch.get_rng_state().equal(state)


def test_torch_order_on_several_is_the_distributed_samplers_permutation() -> None:
    steps = [epoch(feed_of(loader(24), rank, 2, order="torch", seed=7), 2) for rank in range(2)]
    merged = [batch for pair in zip(*steps, strict=True) for batch, _, _ in pair]
    generator = torch.Generator().manual_seed(7 + 2)
    assert [i for batch in merged for i in indices(batch)] == torch.randperm(24, generator=generator).tolist()


# -- users' samplers


def test_a_users_sampler_leaves_the_random_numbers_of_training_alone() -> None:
    feed = feed_of(DataLoader(numbers(60), 4, sampler=EveryThird(60)))
    before = torch.get_rng_state()
    first, second = epoch(feed, 0), epoch(feed, 1)
    assert torch.get_rng_state().equal(before)
    assert drawn(first) != drawn(second)


@pytest.mark.parametrize("with_generator", [False, True])
def test_torchs_other_samplers_are_cut_like_ours(with_generator: bool) -> None:
    def made(seed: int) -> list[DataLoader[Any]]:
        own = [torch.Generator().manual_seed(seed) if with_generator else None for _ in range(2)]
        weighted = WeightedRandomSampler([1.0, 0.0, 2.0] * 10, 25, generator=own[0])
        subset = SubsetRandomSampler(range(5, 28), generator=own[1])
        return [DataLoader(numbers(30), 4, sampler=sampler) for sampler in (weighted, subset)]

    for number in range(2):
        alone = drawn(epoch(feed_of(made(8)[number]), 1))
        shared = [drawn(epoch(feed_of(made(8)[number], rank, 2), 1)) for rank in range(2)]
        assert sorted(shared[0] + shared[1]) == sorted(alone)
        assert len(alone) == (25, 23)[number]
        assert alone != drawn(epoch(feed_of(made(8)[number]), 2))
    assert 1 not in [index % 3 for index in drawn(epoch(feed_of(made(8)[0])))]


def test_a_batch_sampler_gives_each_rank_every_so_manieth_batch() -> None:
    alone = [indices(batch) for batch, _, _ in epoch(feed_of(by_batch_sampler(20, 1)))]
    sampler = Pairs(20)
    feed = feed_of(DataLoader(numbers(20), batch_sampler=sampler), 1, 2)
    second = epoch(feed, 0)
    assert [indices(batch) for batch, weight, _ in second if weight] == alone[1::2]
    assert [weight for _, weight, _ in second if weight] == [len(batch) for batch in alone[1::2]]
    epoch(feed, 4)
    assert sampler.epochs == [0, 4]


def test_torchs_own_batch_sampler_is_cut_by_samples() -> None:
    data = numbers(10)
    made = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False))
    steps = [epoch(feed_of(made, rank, 2)) for rank in range(2)]
    assert [[weight for _, weight, _ in each] for each in steps] == [[4.0, 1.0], [4.0, 1.0]]


@pytest.mark.parametrize("size", [1, 2])
def test_a_data_set_that_takes_a_list_of_indices(size: int) -> None:
    """``batch_size=None`` with a batch sampler for a sampler: torch's road for data sets that read in bulk."""
    data = numbers(10)

    def made(sampler: Any) -> list[list[tuple[Any, float, float]]]:
        bulk = DataLoader(data, batch_size=None, sampler=sampler)
        return [epoch(feed_of(bulk, rank, size)) for rank in range(size)]

    ranks = made(BatchSampler(RandomSampler(data), 4, drop_last=False))
    assert sorted(index for steps in ranks for index in drawn(steps)) == list(range(10))
    assert [weight for _, weight, _ in ranks[0]] == {1: [4.0, 4.0, 2.0], 2: [4.0, 1.0]}[size]
    ranks = made(Pairs(10))
    assert sorted(index for steps in ranks for index in drawn(steps)) == list(range(10))


@pytest.mark.parametrize("size", [1, 2])
def test_a_users_sampler_of_single_samples(size: int) -> None:
    made = DataLoader(numbers(30), batch_size=None, sampler=EveryThird(30))
    ranks = [epoch(feed_of(made, rank, size)) for rank in range(size)]
    assert sorted(index for steps in ranks for index in drawn(steps)) == list(range(0, 30, 3))


def test_a_sampler_without_length_ends_when_it_ends() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(range(11))

    made = DataLoader(numbers(11), 2, sampler=Endless())
    feeds = [feed_of(made, rank, 2) for rank in range(2)]
    assert feeds[0].num_batches == float("inf")
    steps = [epoch(feed, accumulate=2) for feed in feeds]
    assert [len(each) for each in steps] == [3, 3]
    assert sorted(drawn(steps[0] + steps[1])) == list(range(11))
    feeds[0].begin(0)
    assert [window.last for window in feeds[0].windows(2)] == [False, True]


def test_a_distributed_sampler_of_the_users_keeps_its_share() -> None:
    made = [DataLoader(numbers(10), 3, sampler=DistributedSampler(numbers(10), 2, rank)) for rank in range(2)]
    steps = [epoch(feed_of(made[rank], rank, 2), 1) for rank in range(2)]
    assert [[weight for _, weight, _ in each] for each in steps] == [[3.0, 2.0]] * 2
    sampler = DistributedSampler(numbers(10), 2, 1)
    sampler.set_epoch(1)
    assert drawn(steps[1]) == list(sampler)
    with pytest.raises(MisconfigurationException, match=r"num_replicas=2, rank=1.*rank 0 of 3.*use_distributed"):
        feed_of(made[1], 0, 3)


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_a_set_epoch_that_a_sampler_of_torchs_was_given_is_called(kind: Any) -> None:
    sampler: Any = kind(numbers(6))
    told: list[int] = []
    sampler.set_epoch = told.append
    for made in (DataLoader(numbers(6), 2, sampler=sampler), DataLoader(numbers(6), 2)):
        feed = feed_of(made, 0, 1)
        assert [sorted(drawn(epoch(feed, number))) for number in (0, 3)] == [list(range(6))] * 2
    assert told == [0, 3]
    batches = DataLoader(numbers(6), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    epoch(feed_of(batches, 0, 1), 5)
    assert told == [0, 3, 5]


# -- loaders as they are


def test_undistributed_loaders_are_left_alone() -> None:
    made = DataLoader(numbers(10), 3, sampler=DistributedSampler(numbers(10), 2, 1))
    feed = feed_of(made, 0, 2, distribute=False)
    steps = epoch(feed, 4)
    made.sampler.set_epoch(4)  # type: ignore[attr-defined]
    assert [indices(batch) for batch, _, _ in steps] == [indices(batch) for batch in made]
    assert [(weight, share) for _, weight, share in steps] == [(3.0, 1.0), (2.0, 1.0)]


def test_the_users_loader_is_not_changed_and_its_subclass_survives() -> None:
    class Mine(DataLoader[Any]):
        def __init__(self, colour: str, n: int) -> None:
            super().__init__(numbers(n), 4, shuffle=True)
            self.colour = colour

        def __iter__(self) -> Any:
            return ((self.colour, batch) for batch in super().__iter__())

    made = Mine("blue", 10)
    before = copy.copy(made.__dict__)
    steps = epoch(feed_of(made))
    assert made.__dict__ == before
    assert {batch[0] for batch, _, _ in steps} == {"blue"}
    assert sorted(i for batch, _, _ in steps for i in indices(batch[1])) == list(range(10))


def test_iterables_that_are_no_loaders_weighed_one_a_batch() -> None:
    batches = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 9)]
    feed = feed_of(batches)
    assert feed.num_batches == 3
    assert [(weight, share) for _, weight, share in epoch(feed, accumulate=2)] == [(4.0, 0.5), (4.0, 0.5), (1.0, 1.0)]
    assert [share for _, _, share in epoch(feed, accumulate=3)] == [4 / 9, 4 / 9, 1 / 9]


def test_an_endless_iterator_goes_on_where_the_limit_cut_it() -> None:
    feed = feed_of(iter(range(100)), limit=3)
    assert [batch for batch, _, _ in epoch(feed) + epoch(feed, 1)] == [0, 1, 2, 3, 4, 5]


# -- limits and errors


@pytest.mark.parametrize(
    ("limit", "count"), [(None, 13), (1.0, 13), (0.5, 6), (4, 4), (99, 13), (0, 0), (0.0, 0), (1, 1)]
)
def test_limits(limit: Any, count: int) -> None:
    feed = feed_of(loader(50), limit=limit)
    assert feed.num_batches == count == len(epoch(feed, accumulate=3))
    if count:
        feed.begin(0)
        assert [window.last for window in feed.windows(3)][-1]


def test_a_loader_that_ends_too_early_is_named() -> None:
    window = Window(iter([1]), [(1.0, 0.5), (1.0, 0.5)], True, [2.0, 2.0])
    with pytest.raises(RuntimeError, match="yielded fewer batches than its length"):
        list(window)
