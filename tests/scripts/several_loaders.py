"""Several loaders at once: a CombinedLoader to train from, two to validate with, a dict of them in a data module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as L
from lockstep.utilities import CombinedLoader


def points(count: int, slope: float, seed: int) -> TensorDataset:
    """A noisy line."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=generator)
    return TensorDataset(x, slope * x + 0.1 * torch.randn(count, 1, generator=generator))


class TwoTasks(L.LightningModule):
    """One trunk and two heads, each trained on the points of its own loader."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"rising": nn.Linear(16, 1), "falling": nn.Linear(16, 1)})

    def loss(self, batch: Any, task: str) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.heads[task](self.trunk(x)), y)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        losses = {task: self.loss(part, task) for task, part in batch.items()}
        self.log_dict({f"train_{task}": loss for task, loss in losses.items()}, on_step=True, on_epoch=True)
        return torch.stack(list(losses.values())).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch, ("rising", "falling")[dataloader_idx]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        task = ("rising", "falling")[dataloader_idx]
        self.log(f"test_{task}", self.loss(batch, task), add_dataloader_idx=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(folder: Path, **flags: Any) -> dict[str, Any]:
    """Train in each mode; what a test compares is returned."""
    L.seed_everything(42, workers=True, verbose=False)
    found: dict[str, Any] = {}
    for mode in ("max_size_cycle", "min_size"):
        parts = {
            "rising": DataLoader(points(48, 2.0, 1), batch_size=8, shuffle=True),
            "falling": DataLoader(points(30, -1.0, 2), batch_size=8, shuffle=True),
        }
        evaluation = [DataLoader(points(20, 2.0, 3), batch_size=10), DataLoader(points(12, -1.0, 4), batch_size=10)]
        model = TwoTasks()
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            default_root_dir=folder,
            log_every_n_steps=2,
            val_check_interval=0.5,
            limit_val_batches=0.99,
            **flags,
        )
        trainer.fit(model, CombinedLoader(parts, mode), evaluation)
        tested = trainer.test(model, evaluation, verbose=False)
        found |= {f"{mode} {name}": value for part in tested for name, value in part.items()}
        found[f"{mode} batches"] = trainer.num_training_batches
    return found


if __name__ == "__main__":
    print(main(Path(".")))
