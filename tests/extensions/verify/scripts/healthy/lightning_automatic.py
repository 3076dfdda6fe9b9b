"""Trains a small classifier by Lightning's Trainer with DDP and accumulation, with automatic optimization."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(n=128):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1] ** 2 > 0.5).long())


class Classifier(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return [optimizer], [scheduler]


def cli_main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    parser.add_argument("--max_epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(1234)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.max_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(make_dataset(), batch_size=8, shuffle=True))


if __name__ == "__main__":
    cli_main()
