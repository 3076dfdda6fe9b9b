"""A checkpoint that is saved while a validation runs: the resumed run begins it anew, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import SumMetric

from lockstep.callbacks import Callback, EarlyStopping, OnExceptionCheckpoint
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Killed(Exception):
    """In the place of a SIGKILL."""


class Cut(Callback):
    """Saves at the second call of ``hook`` in training and ends the run there."""

    def __init__(self, hook: str, path: Path) -> None:
        self.path, self.left = path, 2
        setattr(self, hook, self.cut)

    def cut(self, trainer: Any, *args: Any) -> None:
        self.left -= not trainer.sanity_checking
        if not self.left:
            trainer.save_checkpoint(self.path)
            raise Killed


class Draws(Slope):
    """Draws random numbers in both steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * torch.rand(()), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", torch.rand(()))


HOOKS = ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"]


def in_two(hook: str, path: Path, start: Any) -> tuple[list[Any], list[Any]]:
    """The weight and the metric of an unbroken fit and of one in two parts."""
    found = []
    flags = {"max_epochs": 3, "num_sanity_val_steps": 0}
    torch.manual_seed(3)
    expected = Draws(lr=0.1)
    result = start(**flags).fit(expected, numbers(8, 2), numbers(4, 2))
    found.append([expected.w.item(), result.metrics["value"]])
    torch.manual_seed(3)
    with pytest.raises(Killed):
        start(**flags, callbacks=[Cut(hook, path)]).fit(Draws(lr=0.1), numbers(8, 2), numbers(4, 2))
    torch.manual_seed(4)
    second = Draws(lr=0.1)
    result = start(**flags).fit(second, numbers(8, 2), numbers(4, 2), ckpt_path=path)
    found.append([second.w.item(), result.metrics["value"]])
    return found[0], found[1]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_save_in_a_validation_that_draws_resumes_to_the_same_bits(hook: str, tmp_path: Path) -> None:
    """The validation was run again from random states behind its first draws."""
    expected, found = in_two(hook, tmp_path / "cut.ckpt", quiet)
    assert found == expected


def test_a_save_in_a_validation_that_draws_resumes_to_the_same_bits_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for expected, found in ranks(2).run(in_two, "on_validation_epoch_end", tmp_path / "cut.ckpt", on_ranks):
        assert found == expected


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
        start(**flags, callbacks=[Cut(hook, path)]).fit(Collects(), numbers(8, 2), numbers(4, 2))
    return expected, start(**flags).fit(Collects(), numbers(8, 2), numbers(4, 2), ckpt_path=path).metrics


@pytest.mark.parametrize("hook", [*HOOKS, "on_train_epoch_end"])
def test_what_metrics_had_collected_in_a_validation_counted_twice(hook: str, tmp_path: Path) -> None:
    expected, found = collected(hook, tmp_path / "cut.ckpt", quiet)
    assert found == expected


def test_what_metrics_had_collected_in_a_validation_counted_twice_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for hook in ("on_validation_epoch_end", "on_validation_end"):
        for expected, found in ranks(2).run(collected, hook, tmp_path / f"{hook}.ckpt", on_ranks):
            assert found == expected


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
