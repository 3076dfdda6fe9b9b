"""torchmetrics: objects and collections that are logged, one of which is reduced over the ranks at the epoch's end."""

import sys

import lightning as L
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        kind = {"task": "multiclass", "num_classes": 3}
        self.train_accuracy = torchmetrics.Accuracy(**kind)
        both = {"accuracy": torchmetrics.Accuracy(**kind), "f1": torchmetrics.F1Score(**kind, average="macro")}
        self.metrics = torchmetrics.MetricCollection(both, prefix="val_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.layer(x)
        self.train_accuracy(found, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(found, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metrics.update(self.layer(x), y)
        self.log_dict(self.metrics)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main(devices):
    L.seed_everything(1, verbose=False)
    x = torch.randn(96, 4)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        **QUIET,
        log_every_n_steps=4,
    )
    trainer.fit(Net(), loader, loader)
    if trainer.is_global_zero:
        for name in ("train_accuracy_epoch", "val_accuracy", "val_f1"):
            print(f"{name}: {trainer.callback_metrics[name].item():.4e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
