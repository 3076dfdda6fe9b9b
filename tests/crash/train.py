"""A small training with all that has a memory of its own: it resumes where it was killed, to the same bits.

python tests/crash/train.py FOLDER --devices 2 --kill rank=1,step=9
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint
from tests.tools.average import MovingAverage
from tests.tools.crash import Kill, KillAt, report

BATCH = 4


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Vectors of 8 numbers, changed at random each time they are read, and the sign of their sum."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index]
        label = (row.sum() > 0).long()
        row = row + 0.1 * torch.randn(8) + 0.1 * torch.from_numpy(np.random.randn(8)).float()
        return (row.flip(0) if random.random() < 0.5 else row), label


class Net(LightningModule):
    """Two layers with BatchNorm and dropout, AdamW, a learning rate that changes with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batches", type=int, default=25, help="micro-batches of an epoch, on each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--keep", choices=("all", "one", "link", "last"), default="all", help="which checkpoints")
    parser.add_argument("--kill", type=Kill.parse)
    args = parser.parse_args()

    seed_everything(7, workers=True, verbose=False)
    # The last global batch is half full: two samples a rank.
    dataset = Noisy(BATCH * args.devices * args.batches - 2 * args.devices)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2)
    model = Net()
    checkpoint = ModelCheckpoint(
        dirpath=args.folder,
        every_n_train_steps=7,
        save_last="link" if args.keep == "link" else True,
        save_top_k={"one": 1, "last": 0}.get(args.keep, -1),
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="auto" if args.devices == 1 else "ddp",
        max_epochs=args.epochs,
        accumulate_grad_batches=3,
        callbacks=[MovingAverage(0.9), checkpoint, *([KillAt(args.kill)] if args.kill else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    result = trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        # The weights are the average now; the optimizer's state tells of the current ones.
        report(
            weights=model.state_dict(),
            optimizer=trainer.optimizers[0].state_dict(),
            metrics=(result.metrics, result.epochs, result.global_step),
        )


if __name__ == "__main__":
    main()
