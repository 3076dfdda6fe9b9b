"""Every row of the support matrix trains, the one that 2019 left out too: dp in 16 bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.ground.extensions import is_there
from tests.loop.pieces import quiet
from tests.surface.matrix import ROWS, Row
from tests.tools.pool import RankPool

THERE = [row for row in ROWS if is_there("parallel") or row.flags.get("strategy") != "dp"]


class Net(LightningModule):
    """A perceptron that notes in which precision it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self.net(x)
        self.dtypes.add(found.dtype)
        return nn.functional.mse_loss(found.float(), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(flags: dict[str, Any], batch_size: int) -> tuple[list[Any], set[str], int, int]:
    torch.manual_seed(1)
    x = torch.randn(24, 4)
    module, trainer = Net(), quiet(max_epochs=2, **flags)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size))
    weights = [parameter.detach().numpy().tolist() for parameter in module.parameters()]
    return weights, {str(dtype) for dtype in module.dtypes}, trainer.world_size, trainer.num_devices


@pytest.mark.parametrize("row", THERE, ids=lambda row: row.command)
def test_a_row_trains_the_model_that_one_device_trains(ranks: RankPool, row: Row) -> None:
    expected, _, _, _ = train({"devices": 1, **{k: v for k, v in row.flags.items() if k == "precision"}}, 8)
    if row.ranks == 1:
        found = [train(row.flags, 8)]
    else:
        found = ranks(row.ranks).run(train, row.flags, 8 // row.ranks, timeout=40)
    half = "precision" in row.flags
    for weights, dtypes, world_size, _ in found:
        assert world_size == row.ranks
        assert dtypes == {"torch.bfloat16" if half else "torch.float32"}
        for own, whole in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(whole), rtol=0, atol=2e-2 if half else 1e-6)


@pytest.mark.parametrize("row", THERE, ids=lambda row: row.command)
def test_the_line_of_2019_makes_the_same_trainer(eight_gpus: None, row: Row) -> None:
    today = {key: "16-mixed" if key == "precision" else value for key, value in row.flags.items()}
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = Trainer(accelerator="gpu", **silent, **today)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old = Trainer(**silent, **row.old)
    for trainer in (made, old):
        assert (trainer.world_size, len(trainer.device_ids)) == (row.ranks, row.devices)
    assert type(old.strategy) is type(made.strategy)
    assert old.precision == made.precision
