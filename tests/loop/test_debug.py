"""Trainer(debug="collectives"): calls of the ranks that do not fit together are named, in place of silent garbage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.supervise.call_comparison import CollectiveMismatch
from lockstep.testing.pool import RankPool
from tests.loop.pieces import Slope, numbers, on_ranks


class Mixed(Slope):
    """In the second validation batch, one rank adds up what the other takes the largest of: gloo says nothing."""

    def __init__(self, strays: bool) -> None:
        super().__init__()
        self.strays = strays

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        largest = batch.max()
        op = dist.ReduceOp.MAX if self.global_rank == 0 or not self.strays or batch_idx == 0 else dist.ReduceOp.SUM
        dist.all_reduce(largest, op)
        self.log("largest", largest, sync_dist=True)


def _validated(strays: bool, debug: str | None) -> Any:
    trainer = on_ranks(debug=debug, max_epochs=1)
    try:
        trainer.fit(Slope(), numbers(8, 2))
        trainer.validate(Mixed(strays), numbers(8, 1), verbose=False)
    except CollectiveMismatch as error:
        return str(error)
    return float(trainer.callback_metrics["largest"])


def test_collectives_that_do_not_fit_are_named(ranks: RankPool) -> None:
    for error in ranks(2).run(_validated, True, "collectives"):
        assert "rank 0 calls all_reduce(float64 of shape (), op=MAX) at " in error
        assert "rank 1 calls all_reduce(float64 of shape (), op=SUM) at " in error
        assert error.count("test_debug.py:26") == 2


@pytest.mark.parametrize("debug", [None, "collectives"])
def test_a_healthy_run_is_left_alone(ranks: RankPool, debug: str | None) -> None:
    alone = float(torch.arange(1.0, 9.0).unfold(0, 2, 2).max(1).values.mean())
    for found in ranks(2).run(_validated, False, debug):
        assert found == pytest.approx(alone)
