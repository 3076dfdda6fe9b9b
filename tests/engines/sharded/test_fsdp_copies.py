"""Copies of a model beside the one that FSDP shards: made before, they are sharded with it; made later, refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.equivalence.models import Blocks, refusal, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


class Averaged(Blocks):
    """An average of its weights is a part of it, with which it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("averaged", self.average(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.01, momentum=0.9)


def averaged(strategy: str) -> tuple[dict[str, Tensor], float]:
    world = dist.get_world_size() if strategy == "fsdp" else 1
    torch.manual_seed(3)
    trainer = quiet(strategy=strategy, devices=world, max_epochs=2, precision="64-true")
    trainer.seed = 5
    trainer.fit(Averaged(), rows(24)(4 // world), rows(7)(1))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}, float(
        trainer.callback_metrics["averaged"]
    )


def test_an_average_that_was_made_before_is_sharded_with_the_module(ranks: RankPool) -> None:
    ((expected, loss),) = ranks(1).run(averaged, "auto", group=False)
    for found, same in ranks(2).run(averaged, "fsdp"):
        assert same == pytest.approx(loss, rel=1e-10)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class CopiedLate(Blocks):
    def on_train_start(self) -> None:
        copy.deepcopy(self)


def test_a_copy_of_shards_is_refused_with_the_ways_out(ranks: RankPool) -> None:
    (found,) = ranks(1).run(refusal, CopiedLate, "fsdp", rows(4)(2))
    assert found.startswith("copy.deepcopy cannot copy CopiedLate, because it is sharded")
    assert "lockstep.callbacks.WeightAveraging" in found
