"""Ray Train starts the ranks and takes their reports; its strategy, environment and callback are Ray's own."""

import sys

import lightning.pytorch as pl
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(config):
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2,
        devices="auto",
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        **QUIET,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2))


def main(workers):
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=sys.argv[2], name="run"),
    )
    result = trainer.fit()
    print("loss: {:.4e}".format(result.metrics["loss"]))
    print("epoch:", result.metrics["epoch"], "step:", result.metrics["step"])
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(f"{folder}/checkpoint.ckpt", weights_only=False)
    print("keys:", sorted(saved["state_dict"]))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
