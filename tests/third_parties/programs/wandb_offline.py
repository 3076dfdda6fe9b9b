"""wandb's logger, offline: hyperparameters, metrics and a watched model."""

import os
import sys

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import lightning as L
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        if self.trainer.is_global_zero:
            wandb.log({"by_hand": loss.item()})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def main(devices):
    L.seed_everything(1, verbose=False)
    model = Net()
    logger = WandbLogger(project="lockstep", save_dir=".")
    logger.watch(model, log="all", log_freq=2)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        log_every_n_steps=2,
        logger=logger,
        **QUIET,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    if trainer.is_global_zero:
        print("config:", dict(logger.experiment.config))
        print("loss: {:.4e}".format(logger.experiment.summary["loss"]))
        print("step:", logger.experiment.summary["trainer/global_step"], "by_hand" in logger.experiment.summary.keys())  # noqa: SIM118
        wandb.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
