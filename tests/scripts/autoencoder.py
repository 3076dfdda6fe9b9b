"""An autoencoder of handwritten digits: fit with validation, test, and codes by predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lockstep as L


class LitAutoEncoder(L.LightningModule):
    """Sixty-four pixels through a code of three numbers."""

    def __init__(self, code: int = 3, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def _loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main(folder: Path, **flags: Any) -> dict[str, Any]:
    """Train for three epochs; what a test compares is returned."""
    L.seed_everything(42, workers=True, verbose=False)
    images = torch.tensor(load_digits().data / 16, dtype=torch.get_default_dtype())[:600]
    train, val, test = random_split(TensorDataset(images), [400, 100, 100])
    model = LitAutoEncoder()
    trainer = L.Trainer(
        max_epochs=3,
        default_root_dir=folder,
        accelerator="cpu",
        log_every_n_steps=5,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        **flags,
    )
    trainer.fit(model, DataLoader(train, batch_size=20, shuffle=True), DataLoader(val, batch_size=50))
    tested = trainer.test(model, DataLoader(test, batch_size=50), verbose=False)
    codes = trainer.predict(model, DataLoader(test, batch_size=50))
    return {**tested[0], "codes": torch.cat(codes).abs().sum().item()}


if __name__ == "__main__":
    print(main(Path(".")))
