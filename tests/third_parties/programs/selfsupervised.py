"""SimCLR's loss and heads from lightly, then its linear classifier on the frozen features, on noise of four kinds."""

import sys

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.utils.benchmarking import LinearClassifier, MetricCallback
from lightly.utils.scheduler import CosineWarmupScheduler
from torch import nn
from torch.utils.data import DataLoader, Dataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Pictures(Dataset):
    def __init__(self, views):
        self.views = views

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        base = torch.full((1, 8, 8), index % 4 / 4.0)
        views = [base + 0.1 * torch.randn(1, 8, 8, generator=generator) for _ in range(self.views)]
        return (views if self.views > 1 else views[0]), index % 4, str(index)


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.projection_head = SimCLRProjectionHead(16, 16, 8)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        (x0, x1), _, _ = batch
        loss = self.criterion(self.projection_head(self(x0)), self.projection_head(self(x1)))
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06)
        schedule = CosineWarmupScheduler(optimizer, 2, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer_of(devices, **flags):
    return pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        **QUIET,
        **flags,
    )


def main(devices):
    pl.seed_everything(1, verbose=False)
    model = SimCLR()
    trainer = trainer_of(devices)
    trainer.fit(model, DataLoader(Pictures(2), batch_size=16, drop_last=True))
    if trainer.is_global_zero:
        print("loss: {:.4e}".format(trainer.callback_metrics["loss"].item()))
    pl.seed_everything(2, verbose=False)
    classifier = LinearClassifier(model, batch_size_per_device=16, feature_dim=16, num_classes=4, topk=(1, 2))
    metrics = MetricCallback()
    trainer = trainer_of(devices, callbacks=[metrics])
    trainer.fit(classifier, DataLoader(Pictures(1), batch_size=16), DataLoader(Pictures(1), batch_size=16))
    if trainer.is_global_zero:
        print("epochs:", {name: len(values) for name, values in sorted(metrics.val_metrics.items())})
        print("val_top2: {:.4e}".format(trainer.callback_metrics["val_top2"].item()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
