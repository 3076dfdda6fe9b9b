"""Loaders and data sets that keep a state of their own, alone and side by side: a pass goes on where it was left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.combined import CombinedLoader
from lockstep.data.feed import Feed
from lockstep.data.source import Replicas
from tests.data.loaders import numbers
from tests.data.test_stream import Quiet, Stateful, StatefulLoader

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


class Still(Stateful):
    """Draws no random numbers."""

    def __iter__(self) -> Any:
        return (torch.cat([sample[:1], torch.zeros(1)]) for sample in super().__iter__())


class Foreign:
    """No DataLoader, with a state."""

    def __init__(self) -> None:
        self.begin = self.read = 0

    def __iter__(self) -> Any:
        self.read, self.begin = self.begin, 0
        for number in range(self.read, 5):
            self.read = number + 1
            yield torch.tensor([number])

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]


class Backwards(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(9, -1, -1))

    def __len__(self) -> int:
        return 10


def torchdatas(data: Any, **options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(data, 2, **options)


FIRST: dict[str, Callable[[], Any]] = {
    "loader": lambda: StatefulLoader(numbers(10), 2),
    "loader of a stream": lambda: StatefulLoader(Quiet(10), 2),
    "stream": lambda: DataLoader(Still(10), 2),
    "foreign": Foreign,
    "sampler": lambda: DataLoader(numbers(10), 2, sampler=Backwards()),
    "torchdata": lambda: torchdatas(numbers(10), shuffle=True),
    "torchdata, stream": lambda: torchdatas(Quiet(10)),
    "torchdata, stream with state": lambda: torchdatas(Still(10)),
    "torchdata, workers": lambda: torchdatas(numbers(10), shuffle=True, num_workers=2),
    "torchdata, workers of a stream": lambda: torchdatas(Quiet(10), num_workers=2),
    "torchdata, workers of a stream with state": lambda: torchdatas(Still(10), num_workers=2),
}
SECOND: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(numbers(14), 2),
    "list": lambda: [torch.tensor([number]) for number in range(7)],
    "stream": lambda: DataLoader(Quiet(14), 2),
}
MODES = [None, "min_size", "max_size", "max_size_cycle"]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return None if batch is None else (batch[0] if isinstance(batch, list) else batch).tolist()


def made(first: str, second: str, mode: Any, distribute: bool) -> Feed:
    torch.manual_seed(0)
    one = FIRST[first]()
    loaders = one if mode is None else CombinedLoader({"one": one, "other": SECOND[second]()}, mode)
    return Feed.train(loaders, replicas=Replicas(), seed=1, distribute=distribute)


def drawn(feed: Feed, epoch: int, start: int = 0, count: int | None = None) -> list[Any]:
    feed.begin(epoch, start)
    return [plain(batch) for window in itertools.islice(feed.windows(1), count) for batch, _, _ in window]


def check(*case: Any) -> None:
    feed = made(*case)
    whole, after = drawn(feed, 0), drawn(feed, 1)
    assert any(batch if not isinstance(batch, dict) else batch["one"] for batch in whole[:1])
    for done in range(1, len(whole) + 1):
        feed = made(*case)
        begun, state = drawn(feed, 0, count=done), feed.state_dict()
        resumed = made(*case)
        resumed.load_state_dict(state)
        assert begun + drawn(resumed, 0, done) == whole, done
        if not case[0].startswith("torchdata") or case[3]:  # taken as it is, it goes on by the process' random numbers
            assert drawn(resumed, 1) == after, done
        for each in (feed, resumed):
            each.close()


EVERY_DAY = [
    ("loader", "plain", "max_size", False),
    ("foreign", "plain", "max_size_cycle", True),
    ("stream", "plain", "max_size", True),
    ("sampler", "plain", "min_size", True),
    ("sampler", "stream", "max_size", True),
]
ALL = [
    (first, second, mode, distribute)
    for first in FIRST
    for second in SECOND
    for mode in MODES
    for distribute in (True, False)
    if (mode is not None or second == "plain") and ("workers" not in first or second == "plain")
]


@pytest.mark.parametrize("case", EVERY_DAY, ids=str)
def test_a_loader_with_a_state_of_its_own_beside_another(case: Any) -> None:
    """It was asked for its state before it was opened; and a sampler's first batch, or all of them, were left out."""
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in EVERY_DAY], ids=str)
def test_loaders_with_a_state_of_their_own(case: Any) -> None:
    check(*case)
