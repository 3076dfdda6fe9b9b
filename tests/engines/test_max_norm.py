"""Embeddings whose forwards scale rows of the weight (`max_norm`), where ranks look up rows of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, strategies
from lockstep.strategies import DDPStrategy, FSDPStrategy
from tests.equivalence.models import refusal
from tests.loop.pieces import quiet
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "owners": lambda: DDPStrategy(shard_optimizer=True),
    "fsdp": FSDPStrategy,
    **({"balanced": lambda: strategies.BalancedStrategy(stages=2)} if is_there("balancing") else {}),
}


class Looks(LightningModule):
    """A table with and without `max_norm`, in front of a chain."""

    def __init__(self, layer: type[nn.Module] = nn.Embedding, max_norm: float | None = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table: Any = layer(6, 4, max_norm=max_norm, dtype=torch.float64)
        self.chain = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64))

    def loss(self, batch: Any) -> Any:
        return (self.chain(self.table(batch[0])) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(width: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12).reshape(-1, width) % 6), batch_size=2)


@pytest.mark.parametrize(
    ("strategy", "layer"), [*((name, nn.Embedding) for name in STRATEGIES), ("ddp", nn.EmbeddingBag)]
)
def test_a_table_with_a_max_norm_is_refused_on_ranks(ranks: RankPool, strategy: str, layer: type[nn.Module]) -> None:
    """Each rank scaled the rows of its own samples, and the ranks' weights parted in silence."""
    for text in ranks(4 if strategy == "balanced" else 2).run(
        refusal, partial(Looks, layer), STRATEGIES[strategy], rows(2)
    ):
        assert f"the {layer.__name__} 'table' with max_norm=0.5" in text
        assert "max_norm=None" in text


def evaluated() -> float:
    return float(quiet(strategy="ddp", devices=2).validate(Looks(), rows(2), verbose=False)[0]["loss"])


def test_a_table_with_a_max_norm_is_evaluated_on_ranks_and_trained_on_one(ranks: RankPool) -> None:
    right = float(quiet().validate(Looks(), rows(2), verbose=False)[0]["loss"])
    assert ranks(2).run(evaluated) == [pytest.approx(right, rel=1e-12)] * 2
    module = Looks()
    quiet(max_epochs=1).fit(module, rows(2))
    assert module.table.weight.norm(dim=1).max() < 1.0


class Scales(Looks):
    """The way out that the refusal names."""

    def __init__(self) -> None:
        super().__init__(max_norm=None)

    def loss(self, batch: Any) -> Any:
        x = self.table(batch[0])
        x = x * (0.5 / x.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        return (self.chain(x) - 1).square().mean()


def scaled() -> list[float]:
    module = Scales()
    quiet(strategy="ddp", devices=2, max_epochs=1).fit(module, DataLoader(rows(2).dataset, batch_size=1))
    return [value for parameter in module.parameters() for value in parameter.flatten().tolist()]


def test_the_way_out_trains_what_one_process_trains(ranks: RankPool) -> None:
    module = Scales()
    quiet(max_epochs=1).fit(module, rows(2))
    right = [value for parameter in module.parameters() for value in parameter.flatten().tolist()]
    assert ranks(2).run(scaled) == [pytest.approx(right, rel=1e-12)] * 2
