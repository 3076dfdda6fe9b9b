"""A user's script that uses what scripts use, without a mistake; ``test_types.py`` asks type checkers for errors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

import lockstep as pl
from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lockstep.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lockstep.loggers import CSVLogger, TensorBoardLogger
from lockstep.strategies import DDPStrategy
from lockstep.tuner import Tuner


class Net(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.ones(1, 2)
        self.net = nn.Sequential(nn.Linear(2, self.hparams.width), nn.ReLU(), nn.Linear(self.hparams["width"], 1))
        self.metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("share", batch_idx / self.trainer.max_epochs)
        self.log_dict({"loss_again": loss, "batch": float(batch_idx)})
        self.log_dict(self.metrics, on_epoch=True)
        self.log("mean", self.mean)
        if self.trainer.is_global_zero and self.logger is not None:
            self.logger.log_metrics({"seen": float(len(x))}, step=self.global_step)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.metrics.update(batch[0])
        self.log_dict(self.metrics.compute())

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        found: Tensor = self(batch[0])
        return found

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "epoch"}}

    def on_train_epoch_end(self) -> None:
        if isinstance(self.logger, TensorBoardLogger):
            self.logger.experiment.add_scalar("epoch", self.current_epoch)
        rate: float = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.print(rate, self.trainer.callback_metrics["loss"].item(), self.device)


class ByHand(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(scheduler, StepLR)
        optimizer.zero_grad()
        loss = self.layer(batch[0]).sum()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[StepLR]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]


class Pair(ByHand):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).sum())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(self.data, batch_size=self.batch_size)]


class Watcher(Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > 100 and trainer.log_every_n_steps:
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(trainer.current_epoch, trainer.max_steps, trainer.num_val_batches, trainer.default_root_dir)


if __name__ == "__main__":
    seed_everything(0, workers=True)
    saver = ModelCheckpoint(monitor="loss", save_top_k=2, mode="min")
    watchers = [Watcher()]
    several = [saver, EarlyStopping("loss")]
    print(Trainer(callbacks=watchers), Trainer(callbacks=several), Trainer(callbacks=saver))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=False),
        max_epochs=2,
        limit_train_batches=0.5,
        precision="bf16-mixed",
        logger=[CSVLogger("logs"), TensorBoardLogger("logs")],
        callbacks=[saver, EarlyStopping("loss"), LearningRateMonitor(), RichProgressBar(), Watcher()],
        accumulate_grad_batches={0: 2, 4: 1},
        gradient_clip_val=1.0,
    )
    settings: dict[str, Any] = {"max_epochs": 1, "devices": 1}
    print(Trainer(**settings).max_epochs)
    tuner = Tuner(trainer)
    finder = tuner.lr_find(Net())
    if finder is not None:
        print(finder.suggestion())
    model = Net.load_from_checkpoint(saver.best_model_path, lr=0.2)
    result = trainer.fit(model, datamodule=Data())
    print(result.metrics["loss"], result.best_model_path)
    trainer.fit(ByHand(), DataLoader(TensorDataset(torch.ones(4, 2))))
    trainer.validate(model, DataLoader(TensorDataset(torch.ones(4, 2))))
    metrics: float = trainer.test(model, datamodule=Data())[0]["loss"]
    predictions = trainer.predict(model, datamodule=Data(), ckpt_path="best")
    trainer.save_checkpoint("last.ckpt")
    if trainer.checkpoint_callback is not None:
        trainer.max_epochs = 4
