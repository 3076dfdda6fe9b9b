"""Prediction with a writer: each batch's classes and the whole epoch's go to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as L
from lockstep.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint


class Writer(BasePredictionWriter):
    """Writes predictions, and the places in the data set that they belong to, with torch.save."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        torch.save({"classes": prediction, "indices": batch_indices}, self.folder / f"{dataloader_idx}-{batch_idx}.pt")

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        torch.save({"classes": predictions, "indices": batch_indices}, self.folder / "epoch.pt")


class Perceptron(L.LightningModule):
    """Two linear layers for ten classes."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path, **flags: Any) -> dict[str, Any]:
    """Train, take the best checkpoint, predict; what a test compares is returned."""
    L.seed_everything(42, workers=True, verbose=False)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.get_default_dtype()), torch.tensor(labels)
    callbacks = [
        *flags.pop("callbacks", []),
        EarlyStopping("val_acc", mode="max", patience=1),
        ModelCheckpoint(folder, monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}"),
        Writer(folder),
    ]
    flags.pop("enable_checkpointing", None)
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **flags)
    train = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=50, shuffle=True)
    trainer.fit(Perceptron(), train, DataLoader(TensorDataset(x[500:700], y[500:700]), batch_size=50))
    best = Perceptron.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    predicted = trainer.predict(best, DataLoader(TensorDataset(x[700:790]), batch_size=40))
    written = [torch.load(folder / f"0-{number}.pt", weights_only=False) for number in range(3)]
    whole = torch.load(folder / "epoch.pt", weights_only=False)
    return {
        "epochs": trainer.current_epoch,
        "best": trainer.checkpoint_callback.best_model_score.item(),
        "predicted": [part.tolist() for part in predicted],
        "written": [part["classes"].tolist() for part in written],
        "indices": [list(part["indices"]) for part in written],
        "whole": [part.tolist() for part in whole["classes"]],
        "whole indices": [[list(part) for part in loader] for loader in whole["indices"]],
    }


if __name__ == "__main__":
    print(main(Path(".")))
