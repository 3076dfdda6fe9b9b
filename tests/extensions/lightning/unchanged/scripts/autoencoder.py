"""An autoencoder with validation, checkpoints, early stopping, a plateau schedule, a test and a prediction."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class AutoEncoder(L.LightningModule):
    def __init__(self, code=3, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, code))
        self.decoder = nn.Sequential(nn.Linear(code, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, x):
        return self.encoder(x)

    def loss(self, batch):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self(x)), x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def main(devices):
    L.seed_everything(42, workers=True)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(192, 2, generator=generator) @ torch.randn(2, 16, generator=generator)
    train, val, test = random_split(TensorDataset(images), [128, 32, 32], generator=generator)
    checkpoint = ModelCheckpoint(monitor="val_loss", save_last=True, filename="{epoch}-{step}")
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        log_every_n_steps=4,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=3), LearningRateMonitor()],
        logger=CSVLogger("."),
        enable_progress_bar=False,
    )
    model = AutoEncoder()
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found |= {"step": trainer.global_step, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
    found |= {"best": checkpoint.best_model_score.item()}
    found |= trainer.test(model, DataLoader(test, batch_size=16), ckpt_path="best")[0]
    if trainer.is_global_zero:
        print("name", checkpoint.best_model_path.rpartition("/")[2])
        for name, value in sorted(found.items()):
            print("found", name, repr(value))


if __name__ == "__main__":
    main(int(sys.argv[1]))
