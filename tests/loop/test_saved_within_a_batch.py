"""A checkpoint that is saved while a batch is under way goes on before that batch, and counts no gradient twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Killed(Exception):
    """In the place of a SIGKILL."""


class Cut(Callback):
    """Saves at the ``nth`` call of ``hook`` and ends the run there."""

    def __init__(self, hook: str, nth: int, path: Path) -> None:
        self.path, self.left = path, nth
        setattr(self, hook, self.cut)

    def cut(self, trainer: Any, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)
            raise Killed


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


class WithState:
    """A loader of the batches [1.], [2.], [3.] and [4.] that tells where it is."""

    def __init__(self) -> None:
        self.number = self.start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.number, self.start = self.start, 0
        while self.number < 4:
            self.number += 1
            yield torch.tensor([float(self.number)], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["number"]


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


HOOKS = ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


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
@pytest.mark.parametrize("hook", HOOKS)
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
    class Ends(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int:
            return -1 if batch_idx == 3 else 0

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    quiet(max_epochs=1, callbacks=[Ends(), Saves()]).fit(Fails(), numbers(4))
    second = Fails()
    quiet(max_epochs=1, callbacks=[Ends()]).fit(second, numbers(4), ckpt_path=tmp_path / "0.ckpt")
    assert seen(second) == []


@pytest.mark.parametrize(("hook", "told"), [("on_after_backward", True), ("on_train_batch_end", False)])
def test_a_save_while_a_batch_runs_is_told_of(hook: str, told: bool, tmp_path: Path) -> None:
    """What the batch had changed by then counted twice, and nobody said so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(Killed):
            quiet(max_epochs=1, callbacks=[Cut(hook, 2, tmp_path / "cut.ckpt")]).fit(Fails(), numbers(4))
    assert told == any("while a training batch runs" in str(each.message) for each in said)
