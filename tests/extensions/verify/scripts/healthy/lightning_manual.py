"""Trains an autoencoder and a probe on its code by Lightning with manual optimization and two optimizers."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoOptimizers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))
        self.probe = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt_auto, opt_probe = self.optimizers()

        code = self.encoder(x)
        loss = nn.functional.mse_loss(self.decoder(code), x) + 0.0 * self.probe(code).sum()
        opt_auto.zero_grad()
        self.manual_backward(loss)
        opt_auto.step()

        opt_probe.zero_grad()
        probe_loss = nn.functional.cross_entropy(self.probe(self.encoder(x).detach()), y)
        self.manual_backward(probe_loss)
        opt_probe.step()
        self.log_dict({"reconstruction": loss, "probe": probe_loss})

    def configure_optimizers(self):
        auto = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-2)
        return auto, torch.optim.SGD(self.probe.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(8)
        x = torch.randn(96, 3, generator=g) @ torch.randn(3, 12, generator=g)
        self.dataset = TensorDataset(x, x[:, :3].argmax(dim=1))

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, shuffle=True)


if __name__ == "__main__":
    L.seed_everything(5, workers=True)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))),
        strategy="ddp_find_unused_parameters_true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(TwoOptimizers(), datamodule=Data())
