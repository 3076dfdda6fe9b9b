"""Buffers over the ranks: each window begins, and each evaluation runs, with those of rank 0."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loop.pieces import Slope, numbers, on_ranks


class Counting(Slope):
    """Adds rank + 1 to a buffer in every forward, and writes down what each forward found there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.found: dict[str, list[float]] = {"train": [], "val": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.found["train"].append(self.seen.item())
        self.seen += self.global_rank + 1
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.found["val"].append(self.seen.item())


def fit(kind: type[Counting], accumulate: int, **flags: Any) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return what forwards found in the buffer, and the buffers after a fit."""
    module = kind()
    on_ranks(max_epochs=1, accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **flags).fit(
        module, numbers(8), numbers(2)
    )
    return module.found, {name: buffer.item() for name, buffer in module.named_buffers()}


def test_a_window_begins_with_rank_zeros_buffers(ranks: Any) -> None:
    """They were once taken before a window's last micro-batch, so that all but that one ran on differing buffers."""
    (zero, _), (one, _) = ranks(2).run(fit, Counting, 2, timeout=40)
    assert zero["train"] == [0.0, 1.0, 2.0, 3.0]
    assert one["train"] == [0.0, 2.0, 2.0, 4.0]


def test_a_validation_runs_on_rank_zeros_buffers(ranks: Any) -> None:
    """A resumed run has rank 0's buffers on every rank: without this its first validation gave other values."""
    (zero, _), (one, _) = ranks(2).run(fit, Counting, 1, timeout=40)
    assert zero["val"] == one["val"] == [4.0]


class AlwaysValidated(Counting):
    """Is validated after each micro-batch."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("seen", self.seen)


def test_a_validation_within_a_window_runs_on_rank_zeros_buffers(ranks: Any) -> None:
    """Only one at a window's end did: within it, each rank measured a model of its own."""
    (zero, _), (one, _) = ranks(2).run(partial(fit, AlwaysValidated, 2, val_check_interval=1), timeout=40)
    assert zero["val"] == one["val"] == [1.0, 2.0, 3.0, 4.0]
    assert zero["train"] == [0.0, 1.0, 2.0, 3.0]
    assert one["train"] == [0.0, 2.0, 2.0, 4.0]  # as without a validation


class CountsValidations(AlwaysValidated):
    """Has a buffer of its validations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("validations", torch.zeros(()))

    def on_validation_end(self) -> None:
        self.validations += 1


def test_what_a_validation_writes_into_a_buffer_stays(ranks: Any) -> None:
    """Also within a window, where the buffers that forwards have changed are put back."""
    for _, left in ranks(2).run(partial(fit, CountsValidations, 2, val_check_interval=1), timeout=40):
        assert left["validations"] == 4.0


def test_a_fit_leaves_rank_zeros_buffers_on_every_rank(ranks: Any) -> None:
    """They stayed apart by the last window's forwards, so that ranks went on with models that gave other answers."""
    for _, left in ranks(2).run(partial(fit, Counting, 1, limit_val_batches=0), timeout=40):
        assert left == {"seen": 4.0}


class SavesWithinAWindow(Counting):
    """Saves after a window's second micro-batch, or in the validation that follows."""

    path, hook = "", ""

    def save(self, hook: str) -> None:
        if self.path and hook == self.hook and len(self.found["train"]) == 2:
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.save("on_train_batch_end")

    def on_validation_end(self) -> None:
        self.save("on_validation_end")


def resume_within_a_window(path: str, hook: str) -> tuple[list[float], list[float]]:
    flags = {"max_epochs": 1, "accumulate_grad_batches": 3, "val_check_interval": 2, "num_sanity_val_steps": 0}
    whole, rest = SavesWithinAWindow(), SavesWithinAWindow()
    whole.path, whole.hook = path, hook
    on_ranks(**flags).fit(whole, numbers(12), numbers(2))
    on_ranks(**flags).fit(rest, numbers(12), numbers(2), ckpt_path=path)
    return whole.found["train"], rest.found["train"]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_fit_that_goes_on_within_a_window_has_each_ranks_own_buffers(ranks: Any, tmp_path: Any, hook: str) -> None:
    """It had rank 0's, which are taken at a window's end only."""
    for whole, rest in ranks(2).run(resume_within_a_window, str(tmp_path / "within.ckpt"), hook, timeout=40):
        assert rest == whole[2:]
