"""A user's script as a type checker sees it; ``test_types.py`` compares what it says with the comments."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import reveal_type

from lockstep import Callback, LightningDataModule, LightningModule, Trainer


class Net(LightningModule):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        reveal_type(self.trainer)  # lockstep.trainer.Trainer
        reveal_type(self.trainer.current_epoch)  # int
        reveal_type(self.log)  # def (name: str, value: Any | torch._tensor.Tensor | int | float, ...
        reveal_type(self.optimizers())  # lockstep.ground.types.OneOptimizerOrSeveral
        reveal_type(self.hparams)  # lockstep.ground.hyperparameters.AttributeDict
        reveal_type(self.trainer.max_epochs)  # int
        reveal_type(self.logger)  # lockstep.loggers.base.Logger | None
        self.log("loss", batch[0].sum(), prog_bar=True)
        self.log(3, batch[0])  # error: Argument 1 to "log"
        return batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for scheduler in self.trainer.lr_scheduler_configs:
            print(scheduler.scheduler.get_last_lr(), optimizer.param_groups[0]["lr"])


class Watcher(Callback):
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        reveal_type(trainer.global_step)  # int
        reveal_type(pl_module.device)  # torch._C.device

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reveal_type(trainer.fit_loop.progress.epoch)  # int


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        reveal_type(self.trainer)  # lockstep.trainer.Trainer | None
        return DataLoader([1, 2, 3])  # type: ignore[arg-type]


trainer = Trainer(max_epochs=1, callbacks=[Watcher()])
Trainer(max_epochs="three")  # error: Argument "max_epochs" to "Trainer"
reveal_type(trainer)  # lockstep.trainer.Trainer
reveal_type(trainer.fit(Net(), datamodule=Data()))  # lockstep.loop.ending.Result
reveal_type(trainer.fit)  # def (model: lockstep.module.LightningModule, ...
reveal_type(trainer.validate(Net()))  # list[dict[str, float]]
reveal_type(Net.load_from_checkpoint("last.ckpt"))  # tests.surface.typed_script.Net
