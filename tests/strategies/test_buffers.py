"""Buffers over the ranks: each window begins, and each evaluation runs, with those of rank 0."""

from __future__ import annotations

from typing import Any

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


def fit(accumulate: int) -> dict[str, list[float]]:
    module = Counting()
    trainer = on_ranks(max_epochs=1, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    trainer.fit(module, numbers(8), numbers(2))
    return module.found


def test_a_window_begins_with_rank_zeros_buffers(ranks: Any) -> None:
    """They were once taken before a window's last micro-batch, so that all but that one ran on differing buffers."""
    zero, one = ranks(2).run(fit, 2, timeout=40)
    assert zero["train"] == [0.0, 1.0, 2.0, 3.0]
    assert one["train"] == [0.0, 2.0, 2.0, 4.0]


def test_a_validation_runs_on_rank_zeros_buffers(ranks: Any) -> None:
    """A resumed run has rank 0's buffers on every rank: without this its first validation gave other values."""
    zero, one = ranks(2).run(fit, 1, timeout=40)
    assert zero["val"] == one["val"] == [4.0]
