"""A search by optuna whose callback ends trials that do not look promising; on two ranks its study is in a file."""

import os
import sys

import lightning as L
import optuna
import torch
from optuna_integration import PyTorchLightningPruningCallback
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x).squeeze(1), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def objective(trial, devices):
    L.seed_everything(1, verbose=False)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=8)
    callback = PyTorchLightningPruningCallback(trial, monitor="val_loss")
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_spawn" if devices > 1 else "auto",
        callbacks=[callback],
        **QUIET,
    )
    trainer.fit(Net(trial.suggest_categorical("lr", [0.1, 1e-5])), loader, loader)
    callback.check_pruned()
    return trainer.callback_metrics["val_loss"].item()


def main(devices):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="minimize",
        storage="sqlite:///study.db" if devices > 1 else None,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1),
    )
    for lr in (0.1, 1e-5, 0.1):
        study.enqueue_trial({"lr": lr})
    study.optimize(lambda trial: objective(trial, devices), n_trials=3)
    print("states:", [trial.state.name for trial in study.trials])
    print("steps:", [len(trial.intermediate_values) for trial in study.trials])
    print(f"value: {study.best_value:.4e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    if os.path.exists("study.db"):
        os.remove("study.db")
