"""Layers that a module makes on the meta device have the same first values under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from tests.accelerator.left_out import strategies
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class OnMeta(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = layers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


KINDS: dict[str, Any] = {
    "sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
    "balanced": lambda: lockstep.strategies.BalancedStrategy(micro_batches=2),
}


def first_values(strategy: str) -> dict[str, Tensor]:
    """Weights after a step that changes none, on ranks of which each has drawn other numbers before."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(7 if not dist.is_initialized() or dist.get_rank() == 0 else 8)
    trainer = quiet(strategy=KINDS.get(strategy, lambda: strategy)(), devices=size, max_steps=1)
    data: Any = torch.ones(8, 4)
    trainer.fit(OnMeta(), DataLoader(data, 8 // size))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


@pytest.mark.parametrize(
    "strategy", strategies("auto", "ddp", "sharded optimizer", "fsdp", "balanced", "deepspeed_stage_2")
)
def test_values_are_those_of_one_process(ranks: RankPool, strategy: str) -> None:
    """They were refused but under fsdp, by words to make the layers where they had been made."""
    torch.manual_seed(7)
    expected = {f"net.{name}": value for name, value in layers().named_parameters()}
    alone = strategy == "auto"
    for found in [first_values(strategy)] if alone else ranks(2).run(first_values, strategy, timeout=60):
        assert found.keys() == expected.keys()
        assert all(torch.equal(value.cpu(), expected[name]) for name, value in found.items())


def test_a_layer_that_nothing_gives_values_to_is_named() -> None:
    class Bare(OnMeta):
        def configure_model(self) -> None:
            self.bare = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(
        MisconfigurationException, match="The module has 'bare' on the meta device, and no method initializes it"
    ):
        quiet(max_steps=1).fit(Bare(), DataLoader(torch.ones(8, 4), 4))  # type: ignore[arg-type]
