"""Transfer learning: a head on a frozen backbone, which BackboneFinetuning sets free after two epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as L
from lockstep.callbacks import BackboneFinetuning, LearningRateMonitor


class DigitsData(L.LightningDataModule):
    """Some of the digits: those below five to learn from first, the others to transfer to."""

    def __init__(self, classes: range, batch_size: int = 32) -> None:
        super().__init__()
        self.classes = classes
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (labels >= self.classes.start) & (labels < self.classes.stop)
        x = torch.tensor(images[chosen] / 16, dtype=torch.get_default_dtype())
        y = torch.tensor(labels[chosen]) - self.classes.start
        self.train, self.val = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:480], y[320:480])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    """A backbone with BatchNorm, and a head for five classes."""

    def __init__(self, backbone: nn.Module, lr: float = 1e-2) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(16, 5)
        self.lr = lr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        values = {"val_loss": nn.functional.cross_entropy(logits, y), "val_acc": (logits.argmax(1) == y).float().mean()}
        self.log_dict(values, prog_bar=True)

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [3], gamma=0.5)]


def main(folder: Path, **flags: Any) -> dict[str, Any]:
    """Learn five digits, then five others with the same backbone; what a test compares is returned."""
    L.seed_everything(42, workers=True, verbose=False)
    callbacks = flags.pop("callbacks", [])
    backbone = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    first = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"order": flags["order"]} if "order" in flags else {}),
    )
    first.fit(Classifier(backbone), datamodule=DigitsData(range(5)))
    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=2,
        lambda_func=lambda epoch: 1.5,
        backbone_initial_ratio_lr=0.1,
        should_align=True,
        train_bn=False,
    )
    model = Classifier(backbone)
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[finetuning, LearningRateMonitor(), *callbacks],
        **flags,
    )
    trainer.fit(model, datamodule=DigitsData(range(5, 10)))
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**values, "weights": sum(parameter.abs().sum().item() for parameter in model.parameters())}


if __name__ == "__main__":
    print(main(Path(".")))
