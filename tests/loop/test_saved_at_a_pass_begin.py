"""A checkpoint of a pass of which little was read, or that is over: the resumed run sees what an unbroken one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.callbacks import Callback
from tests.loop.pieces import Slope, on_ranks, quiet
from tests.tools.pool import RankPool


class Killed(Exception):
    """In the place of a SIGKILL."""


class Cut(Callback):
    """Saves in the ``nth`` call of ``hook`` and ends the run there."""

    def __init__(self, hook: str, nth: int, path: Path) -> None:
        self.path, self.left = path, nth
        setattr(self, hook, self.cut)

    def cut(self, trainer: Any, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)
            raise Killed


class Numbers(IterableDataset[Any]):
    """The numbers 0 to 7; between two passes its state is that of the end of the one before."""

    def __init__(self) -> None:
        self.number = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.number, self.start = self.start, 0
        while self.number < 8:
            self.number += 1
            yield torch.tensor(self.number - 1.0, dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["number"]


class Batches:
    """The same as a loader of a class of its own, of batches of two."""

    def __init__(self) -> None:
        self.data = Numbers()
        self.state_dict, self.load_state_dict = self.data.state_dict, self.data.load_state_dict

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = iter(self.data)
        return (torch.stack([first, next(numbers)]) for first in numbers)


class Permuted:
    """Batches in an order that ``__iter__`` draws, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(8).double().view(4, 2))


class DrawnLate:
    """The same by a generator, which draws when its first batch is asked for."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randperm(8).double().view(4, 2)


class PermutedWithState(Batches):
    """Batches in an order that ``__iter__`` draws; its state is the order and the place in it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.loaded: dict[str, Any] | None = None
        self.done = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.loaded is None:
            self.order, self.done = torch.randperm(8).tolist(), 0
        else:
            self.order, self.done = self.loaded["order"], self.loaded["done"]
        self.loaded = None
        return self.batches()

    def batches(self) -> Iterator[torch.Tensor]:
        while self.done < 8:
            self.done += 2
            yield torch.tensor(self.order[self.done - 2 : self.done], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class BatchesDrawn(Sampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(8).view(4, 2).tolist())

    def __len__(self) -> int:
        return 4


class CountsPasses(Sampler[int]):
    """An order that differs with each pass, which it counts; its state is the count."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def mapped(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(8, dtype=torch.float64), **options)  # type: ignore[arg-type]


def own_generator() -> DataLoader[Any]:
    return mapped(batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7))


class Reads(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)


def resumed(
    make: Callable[[], Any], hook: str, nth: int, path: Path, flags: dict[str, Any], start: Any = quiet
) -> tuple[list[Any], list[Any]]:
    """What an unbroken fit and one in two parts have seen, from where the second part begins."""
    flags = {"max_epochs": 3, **flags}
    expected, first, second = Reads(lr=0.1), Reads(lr=0.1), Reads(lr=0.1)
    torch.manual_seed(3)
    start(**flags).fit(expected, make())
    torch.manual_seed(3)
    with pytest.raises(Killed):
        start(**flags, callbacks=[Cut(hook, nth, path)]).fit(first, make())
    torch.manual_seed(4)
    start(**flags).fit(second, make(), ckpt_path=path)
    assert second.batches
    assert len(first.batches) + len(second.batches) == len(expected.batches)
    done = len(first.batches)
    return [expected.batches[done:], expected.w.item()], [second.batches, second.w.item()]


@pytest.mark.everyday
@pytest.mark.parametrize(("hook", "nth"), [("on_train_batch_end", n) for n in (1, 5, 6, 7, 9)])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda: DataLoader(Numbers(), batch_size=2), Batches, PermutedWithState])
def test_a_state_before_the_first_sample_of_a_pass_begins_it_anew(
    make: Callable[[], Any], accumulate: int, hook: str, nth: int, tmp_path: Path
) -> None:
    """The data set still told the end of the pass before, and the rest of the epoch was lost."""
    expected, found = resumed(make, hook, nth, tmp_path / "cut.ckpt", {"accumulate_grad_batches": accumulate})
    assert found == expected


@pytest.mark.everyday
@pytest.mark.parametrize("nth", [1, 2, 5, 7])
@pytest.mark.parametrize(
    ("make", "order"),
    [
        (Permuted, "lockstep"),
        (DrawnLate, "lockstep"),
        (lambda: {"a": Permuted(), "b": [torch.zeros(1)] * 4}, "lockstep"),
        (lambda: mapped(batch_sampler=BatchesDrawn()), "torch"),
    ],
)
def test_a_resume_in_an_epochs_first_window_keeps_its_permutation(
    make: Callable[[], Any], order: str, nth: int, tmp_path: Path
) -> None:
    """The pass was opened at its beginning, for which it drew another permutation."""
    flags = {"accumulate_grad_batches": 2, "order": order}
    expected, found = resumed(make, "on_train_batch_end", nth, tmp_path / "cut.ckpt", flags)
    assert found == expected


@pytest.mark.everyday
@pytest.mark.parametrize(("hook", "nth"), [("on_train_epoch_end", 1), ("on_train_epoch_start", 2)])
@pytest.mark.parametrize("flags", [{"order": "torch"}, {"use_distributed_sampler": False}])
@pytest.mark.parametrize(
    "make",
    [
        own_generator,
        lambda: {"a": own_generator(), "b": [torch.zeros(1)] * 4},
        lambda: mapped(batch_size=2, sampler=CountsPasses()),
        lambda: {"a": mapped(batch_size=2, sampler=CountsPasses()), "b": [torch.zeros(1)] * 4},
    ],
)
def test_a_resume_at_an_epochs_end_keeps_generators_and_samplers(
    make: Callable[[], Any], flags: dict[str, Any], hook: str, nth: int, tmp_path: Path
) -> None:
    """The next epoch repeated the order of the first."""
    expected, found = resumed(make, hook, nth, tmp_path / "cut.ckpt", flags)
    assert found == expected


@pytest.mark.parametrize("make", [own_generator, lambda: {"a": own_generator(), "b": [torch.zeros(1)] * 4}])
def test_a_resume_that_is_cut_before_it_reads_loses_nothing(make: Callable[[], Any], tmp_path: Path) -> None:
    """What was loaded for the pass was forgotten where the second attempt saved before its first batch."""
    first, second, expected = tmp_path / "first.ckpt", tmp_path / "second.ckpt", Reads()
    flags: dict[str, Any] = {"max_epochs": 3, "order": "torch"}
    quiet(**flags).fit(expected, make())
    with pytest.raises(Killed):
        quiet(**flags, callbacks=[Cut("on_train_epoch_end", 1, first)]).fit(Reads(), make())
    with pytest.raises(Killed):
        quiet(**flags, callbacks=[Cut("on_train_epoch_start", 1, second)]).fit(Reads(), make(), ckpt_path=first)
    last = Reads()
    quiet(**flags).fit(last, make(), ckpt_path=second)
    assert last.batches == expected.batches[4:]


def resumed_on_ranks(name: str, hook: str, nth: int, path: Path, flags: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    makes = {"stream": lambda: DataLoader(Numbers(), batch_size=2), "batches": Batches, "generator": own_generator}
    return resumed(makes[name], hook, nth, path, flags, on_ranks)


def test_a_pass_begins_anew_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    cases = [
        ("stream", "on_train_batch_end", 3, {"accumulate_grad_batches": 2}),
        ("batches", "on_train_batch_end", 5, {"accumulate_grad_batches": 2}),
        ("generator", "on_train_epoch_end", 1, {"use_distributed_sampler": False}),
    ]
    for number, (name, hook, nth, flags) in enumerate(cases):
        path = tmp_path / f"{number}.ckpt"
        for expected, found in ranks(2).run(resumed_on_ranks, name, hook, nth, path, flags):
            assert found == expected
