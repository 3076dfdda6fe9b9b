"""Shares by weight: ranks take unequal parts of each global batch, and together train on the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lockstep.data.feed import Feed
from lockstep.data.partition import apportion
from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import Stream, by_sampler, drawn, epoch, feed_of, indices, loader, numbers

WEIGHTS = st.lists(st.one_of(st.integers(1, 5), st.floats(0.5, 5.0)), min_size=2, max_size=4)


def feeds(make: Any, shares: Any, **arguments: Any) -> list[Feed]:
    """The feeds of all ranks."""
    return [feed_of(make(), rank, len(shares), shares=shares, **arguments) for rank in range(len(shares))]


@pytest.mark.parametrize("make", [loader, by_sampler])
@given(
    n=st.integers(1, 90),
    batch=st.integers(3, 7),
    weights=WEIGHTS,
    accumulate=st.integers(1, 3),
    number=st.integers(0, 9),
)
@settings(max_examples=30)
def test_every_sample_once_in_proportion_and_the_mean_is_that_of_the_window(
    make: Any, n: int, batch: int, weights: list[float], accumulate: int, number: int
) -> None:
    size, expected = len(weights), apportion(batch * len(weights), len(weights), tuple(weights))
    if 0 in expected:
        return
    ranks = feeds(lambda: make(n, batch), weights)
    for feed in ranks:
        feed.begin(number)
    taken = []
    for windows in zip(*(feed.windows(accumulate) for feed in ranks), strict=True):
        assert len({(window.size, window.last) for window in windows}) == 1
        parts = [list(window) for window in windows]
        for micro_batch in zip(*parts, strict=True):
            sizes = [weight for _, weight, _ in micro_batch]
            if sum(sizes) == batch * size:
                assert sizes == list(expected)
        samples = [[indices(b) for b, weight, _ in steps if weight] for steps in parts]
        mean = torch.tensor([float(i) for of_rank in samples for each in of_rank for i in each]).double().mean()
        averaged = sum(torch.tensor(indices(b)).double().mean() * share for p in parts for b, w, share in p if w) / size
        torch.testing.assert_close(averaged, mean, rtol=1e-12, atol=1e-12)
        taken += [i for of_rank in samples for each in of_rank for i in each]
    assert sorted(taken) == [i * (3 if make is by_sampler else 1) for i in range(n)]


@pytest.mark.parametrize("make", [loader, by_sampler])
@pytest.mark.parametrize("start", [1, 2, 5, 7])
def test_an_epoch_resumed_goes_on_as_it_would_have(make: Any, start: int) -> None:
    for rank in range(2):
        whole, rest = (
            [(indices(b), *numbers) for b, *numbers in epoch(feed_of(make(61, 4), rank, 2, shares=(3, 1)), 3, first, 3)]
            for first in (0, start)
        )
        assert rest == whole[start:]


# -- gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(self, batch: Any) -> Tensor:
        x = torch.stack([(batch + 1.0).double().pow(power / 2) / 8 for power in (1, 2, 3)], dim=1)
        return (self.layers(x).squeeze(1) - x[:, 0].cos()).square().mean()


def trained(shares: Any, length: int, batch: int, accumulate: int) -> Tensor:
    """The weights after two epochs of SGD; ranks' gradients are averaged as a strategy does."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ranks = feeds(lambda: loader(length, batch), shares) if shares else [feed_of(loader(length, batch))]
    for number in range(2):
        for feed in ranks:
            feed.begin(number)
        for windows in zip(*(feed.windows(accumulate) for feed in ranks), strict=True):
            optimizer.zero_grad()
            for window in windows:
                for part, weight, share in window:
                    if weight:
                        (net.loss(part[0]) * share / len(ranks)).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize(("length", "accumulate"), [(48, 1), (53, 1), (53, 2), (51, 3)])
@pytest.mark.parametrize("shares", [(3, 1), (0.2, 0.5)])
def test_ranks_with_unequal_shares_train_the_model_of_one_process(shares: Any, length: int, accumulate: int) -> None:
    alone = trained(None, length, 8, accumulate)
    torch.testing.assert_close(trained(shares, length, 4, accumulate), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_some_ranks_that_average_get_the_mean_over_their_samples(accumulate: int) -> None:
    """Between local steps, as the gradients of one node are averaged."""
    ranks = feeds(lambda: loader(77, 4), (3, 1, 2))
    for feed in ranks:
        feed.begin(0)
    for windows in zip(*(feed.windows(accumulate) for feed in ranks), strict=True):
        node = [windows[0], windows[2]]
        for window in node:
            window.share_among([0, 2])
        parts = [(indices(batch), share) for window in node for batch, weight, share in window if weight]
        list(windows[1])
        values = torch.tensor([float(i) for each, _ in parts for i in each], dtype=torch.float64)
        averaged = sum(torch.tensor(each).double().mean() * share for each, share in parts) / 2
        torch.testing.assert_close(averaged, values.mean(), rtol=1e-12, atol=1e-12)


def test_several_loaders_are_weighed_each_by_its_own_samples() -> None:
    ranks = feeds(lambda: {"a": loader(50, 4), "b": loader(20, 5)}, (3, 1))
    for feed in ranks:
        feed.begin(0)
    for windows in zip(*(feed.windows(2) for feed in ranks), strict=True):
        found: dict[str, list[tuple[list[int], float]]] = {"a": [], "b": []}
        for window in windows:
            for batch, _, share in window:
                parts = getattr(share, "parts", (share, share))
                for name, part in zip("ab", parts, strict=True):
                    if batch is not None and batch[name] is not None:
                        found[name].append((indices(batch[name]), part))
        for each in found.values():
            mean = torch.tensor([float(i) for samples, _ in each for i in samples]).double().mean()
            averaged = sum(torch.tensor(samples).double().mean() * part for samples, part in each) / 2
            torch.testing.assert_close(averaged, mean, rtol=1e-12, atol=1e-12)


# -- other numbers of ranks, empty parts


def test_a_rank_without_a_part_of_the_tail_gets_a_padding_batch() -> None:
    first, second = (epoch(feed_of(loader(9, 4), rank, 2, shares=(1, 3), padded=True)) for rank in range(2))
    assert [weight for _, weight, _ in first] == [2.0, 0.0]
    assert [weight for _, weight, _ in second] == [6.0, 1.0]
    assert indices(first[1][0]) == indices(second[1][0])
    without = epoch(feed_of(loader(9, 4), 0, 2, shares=(1, 3)))
    assert without[1][:2] == (None, 0.0)


# -- what is refused


def batch_sampler() -> DataLoader[Any]:
    class Mine(BatchSampler):
        pass

    return DataLoader(numbers(40), batch_sampler=Mine(SequentialSampler(range(40)), 4, False))


@pytest.mark.parametrize(
    "make",
    [
        batch_sampler,
        lambda: loader(40, None),
        lambda: DataLoader(Stream(40), 4),
        lambda: [torch.arange(4)],
        lambda: DataLoader(numbers(40), 4, sampler=DistributedSampler(numbers(40), 2, 0)),
    ],
)
def test_loaders_of_whole_batches_are_refused_by_name(make: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"shares=\(3, 1\): train_dataloader yields ready-made batches"):
        feed_of(make(), 0, 2, shares=(3, 1))


def test_shares_that_cannot_be() -> None:
    with pytest.raises(MisconfigurationException, match="yields ready-made batches"):
        feed_of(loader(40), 0, 2, shares=(3, 1), distribute=False)
    for wrong in ((1, 2, 3), (1, 0), (1, -2), (1, math.nan), (math.inf, 1)):
        with pytest.raises(
            MisconfigurationException, match="not a list of 2 positive numbers: pass one for each replica"
        ):
            feed_of(loader(40), 0, 2, shares=wrong)
    with pytest.raises(MisconfigurationException, match=r"replica 1 gets no sample .* 4 samples \(batch_size=2 x 2\)"):
        feed_of(loader(40, 2), 0, 2, shares=(9, 1))
    replicas = Replicas(0, 2, lambda tensor: torch.stack([tensor, tensor + 1]))
    with pytest.raises(MisconfigurationException, match="differs between the ranks"):
        Feed.train(loader(40), replicas=replicas, seed=1, shares=(3, 1))
    assert drawn(epoch(feed_of(loader(9, shuffle=False), shares=(3,)))) == list(range(9))
