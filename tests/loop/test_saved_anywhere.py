"""A checkpoint of a pass of which little was read, or that is over: the resumed run sees what an unbroken one does."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from torchmetrics import SumMetric

from lockstep.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Cut, Killed, Slope, Validated, acting, heard, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Numbers(IterableDataset[Any]):
    """The numbers from 0 on; between two passes its state is that of the end of the one before."""

    def __init__(self, count: int = 8) -> None:
        self.count = count
        self.number = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.number, self.start = self.start, 0
        while self.number < self.count:
            self.number += 1
            yield torch.tensor(self.number - 1.0, dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["number"]


class Batches:
    """The same as a loader of a class of its own, of batches of two."""

    def __init__(self, count: int = 8) -> None:
        self.data = Numbers(count)
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
@pytest.mark.parametrize(("hook", "nth"), [("on_train_batch_end", n) for n in (1, 4, 5, 6, 7, 8, 9)])
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


# -- A checkpoint that is saved while a validation runs: the resumed run begins it anew, to the same bits --------


class Draws(Slope):
    """Draws random numbers in both steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * torch.rand(()), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", torch.rand(()))


HOOKS = ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"]


def in_two(hook: str, path: Path, start: Any) -> tuple[list[Any], list[Any]]:
    """The weight and the metric of an unbroken fit and of one in two parts."""

    def fit(seed: int, load: Path | None = None, **flags: Any) -> list[Any]:
        torch.manual_seed(seed)
        module = Draws(lr=0.1)
        trainer = start(max_epochs=3, num_sanity_val_steps=0, **flags)
        result = trainer.fit(module, numbers(8, 2), numbers(4, 2), ckpt_path=load)
        return [module.w.item(), result.metrics["value"]]

    expected = fit(3)
    with pytest.raises(Killed):
        fit(3, callbacks=[Cut(hook, 2, path)])
    return expected, fit(4, path)


def test_a_save_in_a_validation_that_draws_resumes_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """The validation was run again from random states behind its first draws."""
    found = [in_two(hook, tmp_path / f"{hook}.ckpt", quiet) for hook in HOOKS]
    found += ranks(2).run(in_two, "on_validation_epoch_end", tmp_path / "cut.ckpt", on_ranks)
    for whole, in_parts in found:
        assert in_parts == whole


class Collects(Slope):
    """Metrics of torchmetrics: one that is logged, and one that the module computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.logged, self.own, self.seen = SumMetric(), SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen(batch)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logged(batch)
        self.own.update(batch)
        self.log("logged", self.logged, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("own", self.own.compute())
        self.own.reset()


def collected(hook: str, path: Path, start: Any) -> tuple[dict[str, float], dict[str, float]]:
    flags = {"max_epochs": 2, "num_sanity_val_steps": 0}
    expected = start(**flags).fit(Collects(), numbers(8, 2), numbers(4, 2)).metrics
    with pytest.raises(Killed):
        start(**flags, callbacks=[Cut(hook, 2, path)]).fit(Collects(), numbers(8, 2), numbers(4, 2))
    return expected, start(**flags).fit(Collects(), numbers(8, 2), numbers(4, 2), ckpt_path=path).metrics


def test_what_metrics_had_collected_in_a_validation_counted_twice(ranks: RankPool, tmp_path: Path) -> None:
    found = [collected(hook, tmp_path / f"{hook}.ckpt", quiet) for hook in (*HOOKS, "on_train_epoch_end")]
    for hook in ("on_validation_epoch_end", "on_validation_end"):
        found += ranks(2).run(collected, hook, tmp_path / f"{hook} on ranks.ckpt", on_ranks)
    for whole, in_parts in found:
        assert in_parts == whole


class Constant(Slope):
    """Never gets better."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", torch.ones(()))


class SaveAfter(Callback):
    """Saves when a number of validations have ended, or batches later; fails in a batch if it is told to."""

    def __init__(self, folder: Path, validations: int, fails_at: int | None = None) -> None:
        self.folder, self.left, self.fails_at = folder, validations, fails_at

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.folder / "validated.ckpt")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.left:
            trainer.save_checkpoint(self.folder / "later.ckpt")
            self.left -= 1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails_at:
            raise Killed


def counted(start: Any, path: Path | None, accumulate: int, every: int, *others: Callback) -> tuple[int, int]:
    """What EarlyStopping has counted at the end of a fit, and the optimizer steps."""
    stopping = EarlyStopping("value", patience=99)
    flags = {"accumulate_grad_batches": accumulate, "val_check_interval": every, "max_epochs": 2}
    saves = any(isinstance(each, OnExceptionCheckpoint) for each in others)
    trainer = start(callbacks=[stopping, *others], num_sanity_val_steps=0, enable_checkpointing=saves, **flags)
    trainer.fit(Constant(lr=0.1), numbers(48, 2), numbers(2, 1), ckpt_path=path)
    return stopping.wait_count, trainer.global_step


@pytest.mark.parametrize("name", ["validated.ckpt", "later.ckpt"])
@pytest.mark.parametrize("validations", [1, 5])
@pytest.mark.filterwarnings("ignore")
def test_a_validation_within_a_window_that_other_ranks_play_again_counts_once(
    ranks: RankPool, tmp_path: Path, name: str, validations: int
) -> None:
    """EarlyStopping counted 5 for 4: the window was played again, and with it the validation."""
    expected = counted(quiet, None, 4, 6)
    assert counted(quiet, None, 4, 6, SaveAfter(tmp_path, validations)) == expected == (7, 12)
    for accumulate, every in ((4, 6), (2, 3)):  # by the plan of one rank, and by that of two
        assert set(ranks(2).run(counted, on_ranks, tmp_path / name, accumulate, every)) == {expected}


@pytest.mark.filterwarnings("ignore")
def test_a_validation_within_a_window_that_failed_counts_once(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        counted(quiet, None, 4, 6, SaveAfter(tmp_path, 0, fails_at=7), OnExceptionCheckpoint(tmp_path))
    assert counted(quiet, tmp_path / "on_exception.ckpt", 4, 6) == (7, 12)


# -- A checkpoint that is saved while a batch is under way goes on before that batch, and counts no gradient twice


class Fails(Slope):
    """Logs each batch; its ``training_step`` fails in the batch ``at``."""

    def __init__(self, at: int = -1) -> None:
        super().__init__(lr=0.1)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise Killed
        self.log("x", batch.mean(), on_epoch=True)
        return super().training_step(batch, batch_idx)


class WithState(Batches):
    """The batches [1.], [2.], [3.] and [4.]."""

    def __init__(self) -> None:
        super().__init__(4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (number[None] + 1 for number in self.data)


def seen(module: Slope) -> list[float]:
    return [number for batch in module.batches for number in batch]


def loader(kind: str) -> Any:
    return WithState() if kind == "state" else numbers(4)


@pytest.mark.everyday
@pytest.mark.parametrize("kind", ["plain", "state"])
@pytest.mark.parametrize(("accumulate", "at"), [(1, 2), (1, 3), (2, 1), (2, 3), (3, 3), (4, 3)])
@pytest.mark.parametrize("way", ["by hand", "OnExceptionCheckpoint"])
def test_a_batch_that_failed_is_still_to_come(kind: str, accumulate: int, at: int, way: str, tmp_path: Path) -> None:
    """In an epoch's last batch the epoch was over, and the batch, or its whole window, was seen never."""
    flags = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    expected, first, second = Fails(), Fails(at), Fails()
    quiet(**flags).fit(expected, loader(kind))
    saves = {} if way == "by hand" else {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(tmp_path)]}
    trainer = quiet(**flags, **saves)
    with pytest.raises(Killed):
        trainer.fit(first, loader(kind))
    path = tmp_path / "on_exception.ckpt"
    if way == "by hand":
        trainer.save_checkpoint(path)
    result = quiet(**flags).fit(second, loader(kind), ckpt_path=path)
    done = at - at % accumulate
    assert seen(second) == [*range(done + 1, 5), 1, 2, 3, 4]
    assert second.w.item() == expected.w.item()
    assert (result.epochs, result.global_step) == (2, 2 * -(-4 // accumulate))


def test_a_checkpoint_of_an_exception_in_an_epochs_last_batch_goes_on_with_it(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        quiet(
            max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, save_on_exception=True)]
        ).fit(Fails(3), numbers(4))
    (path,) = tmp_path.iterdir()
    second = Fails()
    result = quiet(max_epochs=1).fit(second, numbers(4), ckpt_path=path)
    assert (seen(second), result.global_step) == ([4], 4)


BATCH_HOOKS = ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


def cut_and_resumed(hook: str, nth: int, path: Path, kind: str, start: Any) -> tuple[list[Any], list[Any]]:
    """What an unbroken fit and one that was saved in a hook have seen and learnt."""
    flags = {"max_epochs": 2, "accumulate_grad_batches": 2}
    expected, first, second = Fails(), Fails(), Fails()
    by_kind = {"state": WithState, "plain": lambda: numbers(8, batch_size=2)}
    whole = start(**flags).fit(expected, by_kind[kind]())
    with pytest.raises(Killed):
        start(**flags, callbacks=[Cut(hook, nth, path)]).fit(first, by_kind[kind]())
    result = start(**flags).fit(second, by_kind[kind](), ckpt_path=path)
    before = len(expected.batches) - len(second.batches)
    assert 0 <= before <= len(first.batches)
    return (
        [expected.batches[before:], expected.w.item(), whole.metrics, whole.global_step],
        [second.batches, second.w.item(), result.metrics, result.global_step],
    )


@pytest.mark.everyday
@pytest.mark.parametrize("kind", ["plain", "state"])
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("hook", BATCH_HOOKS)
def test_a_save_within_a_window_counts_a_gradient_once(hook: str, nth: int, kind: str, tmp_path: Path) -> None:
    """The gradients that were saved held the batch under way, which was played again."""
    expected, found = cut_and_resumed(hook, nth, tmp_path / "cut.ckpt", kind, quiet)
    assert found == expected


def test_a_save_within_a_window_counts_a_gradient_once_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for number, (hook, nth) in enumerate([("on_train_batch_start", 2), ("on_before_optimizer_step", 2)]):
        path = tmp_path / f"{number}.ckpt"
        for expected, found in ranks(2).run(cut_and_resumed, hook, nth, path, "plain", on_ranks):
            assert found == expected


def test_a_user_who_ends_the_epoch_leaves_no_batch_under_way(tmp_path: Path) -> None:
    ends = {"on_train_batch_start": lambda module, batch, batch_idx: -1 if batch_idx == 3 else 0}
    path = tmp_path / "cut.ckpt"
    with pytest.raises(Killed):
        quiet(max_epochs=1, callbacks=[Cut("on_train_epoch_end", 1, path)]).fit(acting(**ends), numbers(4))
    second = acting(**ends)
    quiet(max_epochs=1).fit(second, numbers(4), ckpt_path=path)
    assert second.batches == []


@pytest.mark.parametrize(("hook", "told"), [("on_after_backward", True), ("on_train_batch_end", False)])
def test_a_save_while_a_batch_runs_is_told_of(hook: str, told: bool, tmp_path: Path) -> None:
    """What the batch had changed by then counted twice, and nobody said so."""

    def run() -> None:
        with pytest.raises(Killed):
            quiet(max_epochs=1, callbacks=[Cut(hook, 2, tmp_path / "cut.ckpt")]).fit(Fails(), numbers(4))

    assert told == bool(heard(run, "while a training batch runs"))


# -- A hook sets ``trainer.accumulate_grad_batches`` at an epoch's start: a fit that resumes behind it keeps it --


class Sets(Callback):
    """Accumulates 2 batches in the second epoch, 1 in the others."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 2 if trainer.current_epoch == 1 else 1


class Schedule(GradientAccumulationScheduler):
    """The same by a subclass that answers otherwise than its table."""

    def __init__(self) -> None:
        super().__init__({0: 1})

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        return 2 if epoch == 1 else 1


def accumulated(kind: type[Callback], nth: int, path: Path, start: Any = quiet) -> tuple[list[float], list[float], int]:
    """The windows' gradients of an unbroken fit and of one in two parts, and how often the second part has stepped."""
    expected, first, second = Slope(), Slope(), Slope()
    start(max_epochs=3, callbacks=[kind()]).fit(expected, numbers(8, 2))
    with pytest.raises(Killed):
        start(max_epochs=3, callbacks=[kind(), Cut("on_train_batch_end", nth, path)]).fit(first, numbers(8, 2))
    result = start(max_epochs=3, callbacks=[kind()]).fit(second, numbers(8, 2), ckpt_path=path)
    return expected.gradients, first.gradients + second.gradients, result.global_step


@pytest.mark.parametrize("kind", [Sets, Schedule])
@pytest.mark.parametrize("nth", [3, 4, 5, 6, 7, 8, 9])
def test_a_resume_keeps_the_accumulation_that_a_hook_has_set(kind: type[Callback], nth: int, tmp_path: Path) -> None:
    """The rest of the epoch stepped at every batch."""
    expected, found, steps = accumulated(kind, nth, tmp_path / "cut.ckpt")
    assert len(expected) == 10
    assert (found, steps) == (expected, 10)


def test_a_flag_that_the_user_has_changed_wins(tmp_path: Path) -> None:
    path, second = tmp_path / "cut.ckpt", Slope()
    with pytest.raises(Killed):
        quiet(max_epochs=2, callbacks=[Sets(), Cut("on_train_batch_end", 6, path)]).fit(Slope(), numbers(8, 2))
    quiet(max_epochs=2, accumulate_grad_batches=4).fit(second, numbers(8, 2), ckpt_path=path)
    assert len(second.gradients) == 1


def accumulated_on_two(nth: int, path: Path) -> tuple[list[float], list[float], int]:
    return accumulated(Sets, nth, path, on_ranks)


def test_a_resume_keeps_the_accumulation_that_a_hook_has_set_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for expected, found, steps in ranks(2).run(accumulated_on_two, 3, tmp_path / "cut.ckpt"):
        assert (found, steps) == (expected, 5)


# -- Samplers whose order is no function of the epoch: their order is restored after a resume, or refused by name


SAMPLES = 20


class Shuffling(Sampler[int]):
    """A permutation by ``made``."""

    def __init__(self, made: Any = random) -> None:
        self.made = made

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.shuffle(order)
        return iter(order)

    def shuffle(self, order: list[int]) -> None:
        self.made.shuffle(order)


def by_own_numpy() -> Shuffling:
    return Shuffling(np.random.default_rng())


class ByOwnTorch(Shuffling):
    def __init__(self) -> None:
        super().__init__(torch.Generator())
        self.made.seed()

    def shuffle(self, order: list[int]) -> None:
        order[:] = torch.randperm(SAMPLES, generator=self.made).tolist()


class OrderWithState(Shuffling):
    """Its order depends on a number of its own, which it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = random.SystemRandom().randrange(2**30)

    def shuffle(self, order: list[int]) -> None:
        self.turns += 1
        random.Random(self.turns).shuffle(order)

    def state_dict(self) -> dict[str, int]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turns = state["turns"]


class Unseeded(Shuffling):
    """Nobody can draw its order again."""

    def shuffle(self, order: list[int]) -> None:
        random.SystemRandom().shuffle(order)


def sampled(sampler: Any, batches: str, **options: Any) -> DataLoader[Any]:
    data: Any = torch.arange(SAMPLES, dtype=torch.float64)
    if batches == "batch sampler":
        return DataLoader(data, batch_sampler=Chunks(sampler), **options)
    if batches == "plain batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False), **options)
    return DataLoader(data, batch_size=2, sampler=sampler, **options)


class Chunks(Sampler[list[int]]):
    """A batch sampler of a class of its own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return (order[at : at + 2] for at in range(0, SAMPLES, 2))


def epochs(module: Slope) -> list[list[float]]:
    drawn = [sample for batch in module.batches for sample in batch]
    return [drawn[at : at + SAMPLES] for at in range(0, len(drawn), SAMPLES)]


KINDS: dict[str, Callable[[], Shuffling]] = {
    "Python": Shuffling,
    "NumPy": lambda: Shuffling(np.random),
    "own Python": lambda: Shuffling(random.Random()),
    "own NumPy": by_own_numpy,
    "own RandomState": lambda: Shuffling(np.random.RandomState()),
    "own torch": ByOwnTorch,
    "state": OrderWithState,
}


def drawn_in_two(make: Callable[[], Any], path: Path, nth: int = 14, **flags: Any) -> list[list[float]]:
    """What two lives of a run of three epochs drew; the first is cut off after ``nth`` of 30 batches."""
    first, second = Slope(), Slope()
    with pytest.raises(Killed):
        quiet(max_epochs=3, callbacks=[Cut("on_train_batch_end", nth, path)], **flags).fit(first, make())
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)  # the process is another one
    quiet(max_epochs=3, **flags).fit(second, make(), ckpt_path=path)
    first.batches += second.batches
    return epochs(first)


@pytest.mark.everyday
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batches", "flags"),
    [
        *[(batches, {}) for batches in ("samples", "batch sampler", "plain batch sampler")],
        *[("samples", flags) for flags in ({"use_distributed_sampler": False}, {"order": "torch"})],
    ],
    ids=str,
)
def test_a_resume_draws_a_samplers_order_again(kind: str, batches: str, flags: Any, tmp_path: Path) -> None:
    """A sampler with NumPy's, Python's or its own randomness repeated and lost samples after a resume in mid-epoch."""
    for drawn in drawn_in_two(lambda: sampled(KINDS[kind](), batches), tmp_path / "cut.ckpt", **flags):
        assert sorted(drawn) == list(range(SAMPLES))


def test_a_plain_shuffle_by_a_generator_of_the_users_resumes_under_torchs_order(tmp_path: Path) -> None:
    def make() -> Any:
        own = torch.Generator()
        own.seed()
        return sampled(None, "samples", shuffle=True, generator=own)

    for drawn in drawn_in_two(make, tmp_path / "cut.ckpt", order="torch"):
        assert sorted(drawn) == list(range(SAMPLES))


def test_a_weighted_sampler_goes_on_with_the_samples_it_had_drawn(tmp_path: Path) -> None:
    def make() -> Any:
        own = torch.Generator().manual_seed(5)
        return sampled(WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=own), "samples")

    whole = Slope()
    torch.manual_seed(7)
    quiet(max_epochs=3).fit(whole, make())
    torch.manual_seed(7)
    assert drawn_in_two(make, tmp_path / "cut.ckpt") == epochs(whole)


@pytest.mark.parametrize("flags", [{}, {"use_distributed_sampler": False}])
@pytest.mark.parametrize("batches", ["samples", "batch sampler"])
def test_an_order_that_cannot_be_drawn_again_is_refused_by_name(
    flags: dict[str, Any], batches: str, tmp_path: Path
) -> None:
    name = "Chunks" if batches == "batch sampler" and not flags else "Unseeded"
    with pytest.raises(MisconfigurationException, match=f"train_dataloader: the {name} draws a different order"):
        drawn_in_two(lambda: sampled(Unseeded(), batches), tmp_path / "cut.ckpt", **flags)


def test_such_a_run_goes_on_from_an_epochs_end(tmp_path: Path) -> None:
    for drawn in drawn_in_two(lambda: sampled(Unseeded(), "samples"), tmp_path / "cut.ckpt", nth=10):
        assert sorted(drawn) == list(range(SAMPLES))


def play_ranks(kind: Callable[[], Shuffling], stage: str) -> str:
    try:
        if stage == "fit":
            on_ranks(max_epochs=1).fit(Slope(), sampled(kind(), "samples"))
        else:
            on_ranks().validate(Validated(), sampled(kind(), "samples"), verbose=False)
    except MisconfigurationException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_an_order_that_differs_between_ranks_is_refused_by_name(ranks: RankPool, stage: str) -> None:
    for told in ranks(2).run(play_ranks, Unseeded, stage):
        assert "the Unseeded draws a different order on each rank" in told
    assert ranks(2).run(play_ranks, by_own_numpy, stage) == ["", ""]


def play_fewer(path: Path) -> Any:
    module = Slope()
    flags: dict[str, Any] = {} if path.exists() else {"callbacks": [Cut("on_train_batch_end", 3, path)]}
    with contextlib.suppress(Killed):
        on_ranks(max_epochs=1, **flags).fit(module, sampled(by_own_numpy(), "samples"))
    return [sample for batch in module.batches for sample in batch]


def test_other_ranks_go_on_with_the_order_of_an_unseeded_generator(ranks: RankPool, tmp_path: Path) -> None:
    """The seed that the first life's generator happened to have went with its rank's part of the checkpoint."""
    path = tmp_path / "cut.ckpt"
    seen = [sample for drawn in ranks(2).run(play_fewer, path) for sample in drawn]
    module = Slope()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, sampled(by_own_numpy(), "samples"), ckpt_path=path)
    assert sorted(seen + [sample for batch in module.batches for sample in batch]) == list(range(SAMPLES))


def play_shuffled(path: Path, epoch_end: bool) -> Any:
    """What one life drew, and what it was told of permutations; the first one ends in mid-epoch, or at its end."""
    module, nth = Slope(), SAMPLES // 2 if epoch_end else 3
    flags: dict[str, Any] = {} if path.exists() else {"callbacks": [Cut("on_train_batch_end", nth, path)]}
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(Killed):
        warnings.simplefilter("always")
        quiet(max_epochs=2, order="torch", devices=max(1, comm.world_size()), **flags).fit(
            module, sampled(None, "samples", shuffle=True), ckpt_path=path if path.exists() else None
        )
    return module.batches, any("draws a different permutation" in str(each.message) for each in caught)


@pytest.mark.parametrize("epoch_end", [False, True])
def test_a_resume_from_one_process_on_several_is_said_under_torchs_order(
    epoch_end: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """It was not: samples came twice and others never, in silence."""
    path = tmp_path / "cut.ckpt"
    assert not play_shuffled(path, epoch_end)[1]
    of_ranks = ranks(2).run(play_shuffled, path, epoch_end)
    assert of_ranks[0][1] is not epoch_end
    if epoch_end:
        assert sorted(s for drawn, _ in of_ranks for batch in drawn for s in batch) == list(range(SAMPLES))
    assert not play_shuffled(path, epoch_end)[1]


class OtherStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        begin = random.SystemRandom().randrange(2**30)
        return iter(torch.arange(begin, begin + SAMPLES, dtype=torch.float64))


class SameStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(SAMPLES).double())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_begins_with_another_sample_after_a_resume_is_said(workers: int, tmp_path: Path) -> None:
    def told(kind: Any) -> list[str]:
        make = lambda: DataLoader(kind(), batch_size=2, num_workers=workers)  # noqa: E731
        return heard(lambda: drawn_in_two(make, tmp_path / "cut.ckpt"), "starts with a different sample")

    (said,) = told(OtherStream)
    assert "train_dataloader" in said
    assert "OtherStream" in said
    assert not told(SameStream)
