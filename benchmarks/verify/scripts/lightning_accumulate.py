"""Lightning: accumulate_grad_batches, clipping, BatchNorm, dropout and bf16."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
data = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
trainer = L.Trainer(
    max_epochs=2,
    devices=2,
    strategy="ddp",
    sync_batchnorm=False,
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True))
