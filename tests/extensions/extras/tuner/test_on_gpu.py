"""The searches on a CUDA device: memory that is truly used up, weights and generators of the device put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep import LightningDataModule, LightningModule
from lockstep.tuner import Tuner
from tests.loop.pieces import quiet

pytestmark = pytest.mark.gpu
BYTES = 2**30
"""What one sample's activation takes on the device."""


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        return index


class Data(LightningDataModule):
    batch_size = 1

    def train_dataloader(self) -> Any:
        return DataLoader(Indices(), self.batch_size)


class Greedy(LightningModule):
    """Takes a gibibyte a sample; dropout draws from the device's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        held = torch.empty(len(batch) * BYTES, dtype=torch.uint8, device=self.device)
        x = torch.ones(len(batch), 8, dtype=torch.float64, device=self.device)
        return self.net(x).mean() + 0.0 * held[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_memory_that_is_used_up_ends_the_search(mode: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    most = free // BYTES
    module, data = Greedy(), Data()
    found = Tuner(quiet(accelerator="gpu", devices=1)).scale_batch_size(
        module, datamodule=data, mode=mode, steps_per_trial=1, margin=0.0
    )
    assert found is not None
    assert found == data.batch_size
    assert (most // 2 < found <= most) if mode == "power" else (most - 2 <= found <= most)
    assert torch.cuda.memory_allocated() < BYTES


def test_a_search_leaves_the_device_as_it_was() -> None:
    module = Greedy().cuda()
    torch.cuda.manual_seed(3)
    state, weights = torch.cuda.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    data = Data()
    data.batch_size = 2
    tuner = Tuner(quiet(accelerator="gpu", devices=1))
    finder = tuner.lr_find(module, datamodule=data, num_training=20, early_stop_threshold=None)
    assert finder is not None
    assert len(finder.results["lr"]) > 2
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(torch.equal(weights[name].cpu(), value.cpu()) for name, value in module.state_dict().items())
