"""A checkpoint that Lightning 2.6.6 wrote (data/make_lightning_checkpoint.py made it) loads, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from tests.loop.pieces import quiet

WRITTEN = Path(__file__).parent / "data" / "lightning-2.6.6.ckpt"
# what Lightning's own fit went on to, as make_lightning_checkpoint.py prints it
FINAL = [0.68685314726108, 0.7239603083617661, 0.2087269985413818]


class Regression(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_it_loads_with_its_hyperparameters() -> None:
    module = Regression.load_from_checkpoint(WRITTEN)
    assert module.hparams == {"lr": 0.2}
    assert not torch.equal(module.layer.weight, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert Regression.load_from_checkpoint(WRITTEN, lr=0.3).hparams == {"lr": 0.3}


def test_training_goes_on_from_it_as_lightnings_did() -> None:
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)  # type: ignore[arg-type]
    module = Regression(lr=0.2)
    trainer = quiet(max_epochs=2)
    result = trainer.fit(module, data, ckpt_path=WRITTEN)
    assert (module.steps, result.epochs, result.global_step) == (3, 2, 6)
    found = [*module.layer.weight.flatten().tolist(), module.layer.bias.item()]
    assert found == pytest.approx(FINAL, rel=1e-14)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
