"""A fit that mlflow logs by itself: parameters, metrics, the summary, the best checkpoint and the model."""

import sys

import lightning as L
import mlflow
import torch
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main(devices):
    L.seed_everything(1, verbose=False)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        log_every_n_steps=1,
        callbacks=[L.pytorch.callbacks.EarlyStopping("val_loss", patience=1)],
        **QUIET,
        enable_checkpointing=True,
    )
    if trainer.global_rank == 0:  # ranks of one script would each log a run
        mlflow.set_tracking_uri("sqlite:///mlflow.db")
        mlflow.pytorch.autolog(log_models=False)
        with mlflow.start_run() as run:
            trainer.fit(Net(), loader, loader)
        client = mlflow.MlflowClient()
        data = client.get_run(run.info.run_id).data
        print("params:", sorted(set(data.params) & {"epochs", "optimizer_name", "lr", "monitor", "patience"}))
        print("val_loss:", [f"{each.value:.4e}" for each in client.get_metric_history(run.info.run_id, "val_loss")])
        print("artifacts:", sorted(each.path for each in client.list_artifacts(run.info.run_id)))
    else:
        trainer.fit(Net(), loader, loader)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
