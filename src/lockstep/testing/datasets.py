"""Small random data sets whose content depends on their arguments only, so that every rank holds the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


def _rows(size: int, length: int, seed: int) -> Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed))


class RandomDataset(Dataset[Tensor]):
    """``length`` normal vectors of ``size`` numbers."""

    def __init__(self, size: int, length: int, seed: int = 0) -> None:
        self.data = _rows(size, length, seed)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class RandomDictDataset(RandomDataset):
    """The same vectors as ``{"a": vector, "b": vector + 2}``."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"a": self.data[index], "b": self.data[index] + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """``count`` normal vectors of ``size`` numbers, one after the other; without a length."""

    def __init__(self, size: int, count: int, seed: int = 0) -> None:
        self.size = size
        self.count = count
        self.seed = seed

    def __iter__(self) -> Iterator[Tensor]:
        yield from _rows(self.size, self.count, self.seed)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count
