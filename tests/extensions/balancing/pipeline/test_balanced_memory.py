"""A pipeline frees the graphs of micro-batches that are through."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import BalancedStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

PARTS = 8


class Counting(nn.Module):
    """A block that counts its outputs that are there; the backward of each needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.alive = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh()
        if x.device.type != "meta":
            self.alive += 1
            weakref.finalize(out.untyped_storage(), self.gone).atexit = False
        return out

    def gone(self) -> None:
        self.alive -= 1


class Watched(LightningModule):
    def __init__(self, returns_dict: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Counting() for _ in range(4)])
        self.returns_dict, self.most = returns_dict, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.blocks(batch[0]).square().mean()
        self.most = max(self.most, self.blocks[-1].alive)  # type: ignore[arg-type]
        return {"loss": loss, "twice": 2 * loss} if self.returns_dict else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def most_at_a_time(schedule: str, returns_dict: bool) -> int:
    module = Watched(returns_dict)
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 12 * PARTS).view(-1, 4)), PARTS)
    strategy = BalancedStrategy(schedule=schedule, micro_batches=PARTS, split="equal")
    quiet(strategy=strategy, devices=2, max_epochs=1).fit(module, loader)
    return module.most


@pytest.mark.parametrize(
    ("schedule", "most", "returns_dict"), [("1f1b", 1, False), ("zero-bubble", 3, False), ("zero-bubble", 3, True)]
)
def test_the_last_stage_keeps_no_graph_of_a_micro_batch_that_is_through(
    ranks: RankPool, schedule: str, most: int, returns_dict: bool
) -> None:
    """What the step returned held the graph of each, under "zero-bubble" with all of its activations."""
    assert 1 <= ranks(2).run(most_at_a_time, schedule, returns_dict)[0] <= most
