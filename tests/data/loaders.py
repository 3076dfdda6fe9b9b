"""Data sets, loaders and small worlds that the tests of this folder share."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from lockstep.data.feed import Feed
from lockstep.data.source import Replicas


def alike(size: int) -> Any:
    """What a gather of the ranks' tensors gives where all ranks hold the same."""
    return lambda tensor: tensor.expand(size, *tensor.shape)


class Meeting:
    """A gather for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts: list[Any] = [None] * size
        self.calls = 0

    def of(self, rank: int) -> Any:
        def gather(tensor: Tensor) -> Tensor:
            self.calls += rank == 0
            self.parts[rank] = tensor
            self.barrier.wait()
            together = torch.stack(self.parts)
            self.barrier.wait()
            return together

        return gather


def as_threads(size: int, play: Any) -> list[Any]:
    """``play(rank, gather)`` of every rank, each in a thread; without workers (they fork)."""
    meeting, results = Meeting(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = play(rank, meeting.of(rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def numbers(n: int) -> TensorDataset:
    """Samples 0 to n - 1; fetching draws no random numbers."""
    return TensorDataset(torch.arange(n))


class Augmented(Dataset[Tensor]):
    """Samples (index, a random number of torch's, of python's, of numpy's)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


class AugmentedBatches(Augmented):
    """As above, but fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[indices[number]] for number in range(len(indices))]  # does not iterate over them


def noisy_collate(samples: list[Tensor]) -> Tensor:
    """Puts a random number beside each sample."""
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], dim=1)


class Stream(IterableDataset[Tensor]):
    """Samples (index, random number); ``sharded`` looks at the worker it is in, as torch's manual advises."""

    def __init__(self, n: int, sharded: bool = False) -> None:
        self.n = n
        self.sharded = sharded

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        mine = range(self.n)
        if self.sharded and info is not None:
            mine = range(info.id, self.n, info.num_workers)
        for index in mine:
            yield torch.tensor([index, torch.rand(()).item()])


class SizedStream(Stream):
    """A stream that tells its length."""

    def __len__(self) -> int:
        return self.n


def feed_of(source: Any, rank: int = 0, size: int = 1, **arguments: Any) -> Feed:
    """A training feed of one rank; unless ``gather`` is given, the other ranks are taken to be alike."""
    gather = arguments.pop("gather", alike(size) if size > 1 else None)
    arguments.setdefault("seed", 42)
    return Feed.train(source, replicas=Replicas(rank, size, gather), **arguments)


def epoch(feed: Feed, epoch: int = 0, start: int = 0, accumulate: int = 1) -> list[tuple[Any, float, float]]:
    """All (batch, weight, share) of an epoch."""
    feed.begin(epoch, start)
    return [each for window in feed.windows(accumulate) for each in window]


def drawn(steps: list[tuple[Any, float, float]]) -> list[int]:
    """Indices of the samples that count: those of steps with a weight."""
    return [index for batch, weight, _ in steps if weight for index in indices(batch)]


def indices(batch: Any) -> list[int]:
    """Indices of a batch of any of the data sets above; none where a rank has no samples."""
    if batch is None:
        return []
    first = batch[0] if isinstance(batch, list | tuple) else batch
    return [int(value) for value in (first[:, 0] if first.dim() == 2 else first.reshape(-1))]


def loader(n: int, batch_size: int | None = 4, shuffle: bool = True, **arguments: Any) -> DataLoader[Any]:
    """A loader over :func:`numbers`."""
    return DataLoader(numbers(n), batch_size=batch_size, shuffle=shuffle, **arguments)


class EveryThird(Sampler[int]):
    """A sampler of the user's that draws from torch's global generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter([3 * index for index in torch.randperm(self.n // 3).tolist()])

    def __len__(self) -> int:
        return self.n // 3


def by_sampler(n: int, batch: int) -> DataLoader[Any]:
    """A loader over ``n`` samples (0, 3, 6, ...) with a sampler of the user's."""
    return DataLoader(numbers(3 * n), batch, sampler=EveryThird(3 * n))
