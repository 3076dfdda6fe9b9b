"""A pass over loader workers ends, whatever one of them held when it was killed."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from lockstep.data.workers import opened
from lockstep.supervise.signals import handling
from tests.data.loaders import epoch, feed_of

WORKERS = 2
BEFORE = 2 * WORKERS
"""So many batches are asked for in advance: whoever fetches a later one does it while the parent waits."""


def die_holding_the_lock() -> None:
    """Takes the lock that a worker takes once a batch, and gets killed."""
    frame: Any = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


class Lethal(Dataset[int]):
    """Samples are the workers' process ids; the worker that is asked for sample ``end`` dies."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __len__(self) -> int:
        return 4 * BEFORE

    def __getitem__(self, index: int) -> int:
        if index == self.end:
            die_holding_the_lock()
        return os.getpid()


class LethalStream(IterableDataset[int]):
    """Each worker gives ``BEFORE`` samples; the first worker dies then."""

    def __iter__(self) -> Iterator[int]:
        yield from range(BEFORE)
        info = get_worker_info()
        if info is not None and info.id == 0:
            die_holding_the_lock()


def loader(dataset: Dataset[int], **arguments: Any) -> DataLoader[Any]:
    """Its batches are lists: tensors are fetched from the worker that made them, which fails in its own way."""
    return DataLoader(dataset, num_workers=WORKERS, collate_fn=list, **arguments)


def indexed(persistent: bool) -> Any:
    return feed_of(loader(Lethal(BEFORE + 1), persistent_workers=persistent))


def stream(persistent: bool) -> Any:
    return feed_of(loader(LethalStream(), persistent_workers=persistent))


def untouched(persistent: bool) -> Any:
    return feed_of(loader(Lethal(BEFORE + 1), persistent_workers=persistent), distribute=False)


def messages(error: BaseException | None) -> list[str]:
    """Of an error and of those that caused it."""
    return [] if error is None else [str(error), *messages(error.__cause__)]


def fails(feed: Any) -> list[str]:
    """What a pass says of which it is known that it fails."""
    try:
        epoch(feed)
    except RuntimeError as error:
        return messages(error)
    raise AssertionError("the pass went well")


@pytest.fixture(autouse=True)
def torch_hears_of_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets its handler of SIGCHLD once; a fit of Lightning's, in another test, puts the old one back."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "persistent"),
    [pytest.param(indexed, False, marks=pytest.mark.slow), (indexed, True), (stream, False), (untouched, False)],
)
def test_a_worker_killed_with_the_lock_ends_the_pass_and_the_other_workers(
    make: Callable[..., Any], persistent: bool
) -> None:
    began = time.monotonic()
    feed = make(persistent)
    said = fails(feed)
    assert any("is killed by signal: Killed" in message for message in said), said
    feed.close()
    del feed
    assert multiprocessing.active_children() == []
    # Torch would wait five seconds for a worker that cannot hear the end.
    assert time.monotonic() - began < 5


class Deadly(Dataset[Any]):
    """Its fourth sample kills whoever fetches it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would lie among the files of the checkout
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.zeros(1)


def test_of_a_worker_that_died_signal_and_samples_are_told() -> None:
    """It was told that it "exited unexpectedly", where torch had not heard of its end before."""
    feed = feed_of(DataLoader(Deadly(), batch_size=2, num_workers=1))
    told = r"DataLoader worker .*: it was killed by SIGSEGV, and had to fetch the samples .*2, 3"
    assert re.search(told, fails(feed)[0])
    feed.close()


class Handed:
    """Stands for torch's iterator while a batch is fetched: a connection breaks, and its worker ends a little later."""

    def __init__(self, worker: Any) -> None:
        self._workers = [worker]
        self._workers_done_event = multiprocessing.Event()

    def __iter__(self) -> Handed:
        return self

    def __next__(self) -> Any:
        return self._try_get_data()

    def _try_get_data(self, timeout: float = 5.0) -> Any:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_whose_connection_broke_before_its_end_is_named() -> None:
    """The error was the connection's, once in many runs: torch had looked before the worker was gone."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.3,))
    worker.start()
    made: Any = opened(Handed(worker))
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid\(s\) {worker.pid}\) exited unexpectedly"):
        made._try_get_data()
    worker.join()


def test_workers_end_by_themselves_and_persistent_ones_live_on() -> None:
    calm = loader(Lethal(-1), persistent_workers=True)
    passes = [{pid for (pid,) in opened(calm)} for _ in range(2)]
    assert passes[0] == passes[1] == {child.pid for child in multiprocessing.active_children()}
    iterator = opened(calm)
    assert type(iterator) is type(calm._iterator)  # nothing stands between torch's iterator and the loop
    began = time.monotonic()
    iterator._shutdown_workers()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_do_not_see_the_signals_that_are_heeded(context: str) -> None:
    noted: list[int] = []
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    with handling(numbers, noted.append):
        feed = DataLoader(Lethal(-1), batch_size=1, num_workers=1, multiprocessing_context=context)
        iterator = opened(feed)
        first = int(next(iterator))
        for number in numbers:
            os.kill(first, number)
        assert {int(pid) for pid in iterator} == {first}
        os.kill(os.getpid(), signal.SIGUSR2)
    assert noted == [signal.SIGUSR2]  # this process hears again


class Masks(Dataset[bool]):
    """Samples are whether the worker has SIGUSR1 blocked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bool:
        return signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_hear_what_nobody_heeds() -> None:
    assert [bool(found) for found in opened(DataLoader(Masks(), num_workers=1))] == [False] * 4
    with handling([signal.SIGUSR1], print):
        assert [bool(found) for found in opened(DataLoader(Masks(), num_workers=1))] == [True] * 4
