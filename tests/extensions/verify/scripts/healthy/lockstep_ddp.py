"""Trains by lockstep's Trainer with strategy ddp; 90 samples, so that the last batches are uneven."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_dataset():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(90, 5, generator=g)
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    args = parser.parse_args()
    seed_everything(3)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(make_dataset(), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
