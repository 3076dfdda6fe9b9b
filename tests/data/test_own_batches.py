"""Loader classes with an `__iter__` or `__len__` of their own: followed, taken as they are, or refused by name."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.data.feed import EvaluationFeed
from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import alike, drawn, epoch, feed_of, indices, numbers


class Repeated:
    """timm's sampler: another one without end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """timm's loader that keeps its workers from epoch to epoch; the one of YOLO is made alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Twice(DataLoader[Any]):
    """Reads its data twice in a pass."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __iter__(self) -> Any:
        for _ in range(2):
            yield from super().__iter__()


class Short(DataLoader[Any]):
    """Reads two batches in a pass."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 2)


class Foreign(DataLoader[Any]):
    """Gives other things than its data set's."""

    def __iter__(self) -> Any:
        return iter(torch.arange(12).split(2))


def validated(loader: Any) -> list[int]:
    feed = EvaluationFeed.of(loader, replicas=Replicas(0, 1), seed=1)
    return [index for batch, *_ in feed for index in indices(batch)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_repeats_its_sampler_gives_each_sample_once_an_epoch(workers: int) -> None:
    feed = feed_of(MultiEpochs(numbers(10), 4, shuffle=True, num_workers=workers))
    first, second = (drawn(epoch(feed, number)) for number in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_such_a_loader_keeps_to_its_distributed_sampler() -> None:
    loaders = [MultiEpochs(numbers(8), 2, sampler=DistributedSampler(numbers(8), 2, rank)) for rank in range(2)]
    feeds = [feed_of(loader, rank, 2) for rank, loader in enumerate(loaders)]
    batches = [index for feed in feeds for batch in feed.sources[0].open(0, 0, 0, 4) for index in indices(batch)]
    assert sorted(batches) == list(range(8))


@pytest.mark.parametrize(("kind", "passes"), [(Twice, [*range(8), *range(8)]), (Short, [*range(6)])])
def test_a_pass_is_what_the_class_says_in_training_and_in_validation(kind: Any, passes: list[int]) -> None:
    made = kind(numbers(8), 8 if kind is Twice else 3)
    plain = [index for batch in made for index in indices(batch)]
    assert drawn(epoch(feed_of(made))) == validated(made) == plain == passes


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MultiEpochs, "a MultiEpochs, and it stores its own iterator (`iterator`)"),
        (Twice, "a Twice, and its length is 6 batches, but that of its sampler is 3"),
    ],
)
def test_several_ranks_refuse_what_they_would_all_see_whole(kind: Any, reason: str) -> None:
    with pytest.raises(MisconfigurationException, match=re.escape(reason)):
        feed_of(kind(numbers(12), 4), 0, 2)
    with pytest.raises(MisconfigurationException, match=re.escape(reason)):
        EvaluationFeed.of(kind(numbers(12), 4), replicas=Replicas(0, 2, alike(2)), seed=1)


def test_batches_that_were_not_drawn_from_the_sampler_are_refused_on_several_ranks() -> None:
    feed = feed_of(Foreign(numbers(12), 2), 0, 2)
    with pytest.raises(MisconfigurationException, match="is a Foreign, and its `__iter__` yielded a batch"):
        epoch(feed)
    assert drawn(epoch(feed_of(Foreign(numbers(12), 2)))) == list(range(12))


class Around(DataLoader[Any]):
    """Gives the batches of another loader."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        super().__init__(inner.dataset, inner.batch_size)
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


def test_a_loader_around_another_one_began_anew_within_a_resumed_epoch() -> None:
    feed = feed_of(Around(DataLoader(numbers(6))))
    feed.begin(0)
    assert len([batch for window in feed.windows(1) for batch in window]) == 6
    feed.begin(0, 2)
    with pytest.raises(MisconfigurationException, match="a Around, and its `__iter__` yielded a batch without drawing"):
        next(iter(next(feed.windows(1))))
