"""A command line by LightningCLI: `python command.py fit --trainer.devices 2 ...`."""

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from torch.utils.data import DataLoader, TensorDataset


class Lines(LightningDataModule):
    def __init__(self, size: int = 64, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        x = torch.randn(self.hparams.size, 4, generator=torch.Generator().manual_seed(3))
        self.data = TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)


class Linear(LightningModule):
    def __init__(
        self,
        width: int = 8,
        optimizer: OptimizerCallable = torch.optim.Adam,
        schedule: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__()
        self.optimizer, self.schedule = optimizer, schedule
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


def main():
    cli = LightningCLI(Linear, Lines, seed_everything_default=5)
    if cli.trainer.is_global_zero:
        found = {name: value.item() for name, value in cli.trainer.callback_metrics.items()}
        found |= {"step": cli.trainer.global_step, "width": cli.model.net[0].out_features}
        found |= {"lr": cli.trainer.optimizers[0].param_groups[0]["lr"]}
        for name, value in sorted(found.items()):
            print("found", name, repr(value))


if __name__ == "__main__":
    main()
