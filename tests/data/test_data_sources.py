"""Samplers over another data source than the data set: their own indices are trained on, as torch has it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import drawn, epoch, feed_of, numbers


class WithoutLength(Dataset[int]):
    """Samples for any index."""

    def __getitem__(self, index: int) -> int:
        return index


def over(sampler: Any, dataset: Any = None) -> DataLoader[Any]:
    return DataLoader(numbers(100) if dataset is None else dataset, 5, sampler=sampler)


def seen(sampler: Any, size: int, dataset: Any = None, **arguments: Any) -> list[int]:
    """What all ranks see in an epoch."""
    return [
        index
        for rank in range(size)
        for index in drawn(epoch(feed_of(over(sampler, dataset), rank, size, **arguments)))
    ]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", ["keyed", "torch"])
@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
@pytest.mark.parametrize("dataset", [None, WithoutLength()])
def test_samples_are_those_of_the_samplers_data_source(kind: Any, order: str, size: int, dataset: Any) -> None:
    found = sorted(seen(kind(range(20)), size, dataset, order=order))
    plain = [int(index) for batch in over(kind(range(20)), WithoutLength()) for index in batch]
    assert found == sorted(plain) == list(range(20))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_that_grows_or_shrinks_behind_its_loader_is_told_of(shuffle: bool) -> None:
    """What had come was never drawn, and what had gone was asked for."""
    kept = [*range(6)]
    feed = feed_of(DataLoader(kept, 2, shuffle=shuffle))  # type: ignore[arg-type]
    assert sorted(drawn(epoch(feed))) == [*range(6)]
    kept.append(6)
    with pytest.warns(UserWarning, match="data set of train_dataloader has 7 samples, but had 6 when its dataloader"):
        assert sorted(drawn(epoch(feed, 1))) == [*range(6)]
    del kept[4:]
    with pytest.raises(MisconfigurationException, match=r"has 4 samples, but had 6 .*reload_dataloaders_every_n_"):
        epoch(feed, 2)


def test_another_batch_size_than_the_epoch_is_planned_by_is_refused() -> None:
    """It was set between two epochs, and nothing took it."""
    plain = DataLoader([*range(6)], 2)  # type: ignore[arg-type]
    feed = feed_of(plain)
    epoch(feed)
    plain.batch_sampler.batch_size = 3  # type: ignore[union-attr]
    with pytest.raises(MisconfigurationException, match=r"batch_size was changed from 2 to 3 .*reload_dataloaders_"):
        epoch(feed, 1)


class Growing:
    """A sampler that has two samples more in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4 + 2 * self.epoch

    def __iter__(self) -> Any:
        return iter(range(len(self)))


def test_a_sampler_that_grows_is_told_of_where_it_is_not_drawn_to_its_end() -> None:
    feed = feed_of(DataLoader(numbers(20), 2, sampler=Growing()))  # type: ignore[arg-type]
    assert drawn(epoch(feed)) == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="sampler of train_dataloader has length 6, but had 4 when"):
        assert drawn(epoch(feed, 1)) == [0, 1, 2, 3]
