"""Averaged weights on ranks of which some have no samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import StochasticWeightAveraging
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(2, 2).double(), nn.BatchNorm1d(2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.norm(self.layer(batch[0])).sub(0.5).pow(4).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def averaged() -> tuple[list[float], list[float]]:
    """Statistics and weights behind two epochs, the last of them averaged."""
    world = dist.get_world_size()
    x = torch.randn(11, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    average = StochasticWeightAveraging(0.01, swa_epoch_start=1, device=None)
    flags = {"strategy": "ddp", "sync_batchnorm": True} if world > 1 else {}
    module = Normed()
    trainer = quiet(devices=world, max_epochs=2, callbacks=[average], precision="64-true", **flags)
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=9 // world))
    assert module.norm.running_mean is not None
    return module.norm.running_mean.tolist(), module.layer.weight.flatten().tolist()


def test_averaged_weights_with_synchronized_statistics_are_those_of_one_process(ranks: RankPool) -> None:
    """The last batch has two samples for three ranks, and the pass that renews statistics runs on all."""
    ((mean, weights),) = ranks(1).run(averaged)
    for found in ranks(3).run(averaged):
        assert found[0] == pytest.approx(mean, abs=1e-12)
        assert found[1] == pytest.approx(weights, abs=1e-12)
