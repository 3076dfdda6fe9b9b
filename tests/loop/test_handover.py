"""What comes back from spawned and forked processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import LightningModule
from lockstep.cluster.world import World
from lockstep.engines.collectives import Collectives
from tests.loop.pieces import numbers, quiet
from tests.tools.pool import RankPool


class Grows(LightningModule):
    """Its layers are made in the hooks that Lightning has for that, as far as they are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 3))

    def setup(self, stage: str) -> None:
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.body.append(nn.Tanh())
            self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x[:, None])) * self.scale
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return self(batch.float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check(module: Grows) -> None:
    assert list(module.state_dict()) == [
        "scale", "seen", "body.0.weight", "body.0.bias", "head.weight", "head.bias"
    ]  # fmt: skip
    assert module.seen.item() == 2.0
    assert module.scale.item() != 1.0
    assert module(torch.ones(2)).shape == (2, 1)


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_layers_that_the_ranks_have_made_come_back(strategy: str) -> None:
    """The weights were to be loaded into a module that lacked them, after all the training was done."""
    module = Grows()
    try:
        quiet(strategy=strategy, devices=2, max_epochs=1).fit(module, numbers(4))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    check(module)


def hear_on_callers() -> list[Any]:
    rank = torch.distributed.get_rank()
    here = Collectives()
    here.world = World(rank, 4, rank % 2, 2, rank // 2, 2, "127.0.0.1", 0)
    return here.gather_on_callers([torch.full((2,), rank), f"of {rank}"])


def test_of_several_nodes_each_has_a_process_that_called(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(4).run(hear_on_callers)):
        expected = [] if rank % 2 else [([other] * 2, f"of {other}") for other in range(4)]
        assert [(tensor.tolist(), words) for tensor, words in found] == expected
