"""Lightning: the quick start, with a validation, logged values and a schedule."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


L.seed_everything(0)
data = TensorDataset(torch.randn(320, 64))
train, val = torch.utils.data.random_split(data, [256, 64], generator=torch.Generator().manual_seed(0))
trainer = L.Trainer(max_epochs=2, devices=2, strategy="ddp", enable_progress_bar=False, logger=False)
trainer.fit(AutoEncoder(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8))
