"""lockstep: the Trainer under its own launcher."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Classifier(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lockstep.seed_everything(0)
data = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
trainer = lockstep.Trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False)
trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True))
