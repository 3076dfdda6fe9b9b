"""A user's script with ten mistakes, each on a line that says so; ``test_types.py`` asks type checkers for them."""

import torch
from torch import Tensor

from lockstep import Callback, LightningModule, Trainer
from lockstep.callbacks import EarlyStopping, ModelCheckpoint


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", "high")  # mistake: with torchmetrics' own types
        self.log("loss", 1.0, progress_bar=True)  # mistake
        print(self.trainer.curent_epoch)  # mistake
        self.lgo("loss", 1.0)  # mistake
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watcher(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(trainer.callback_metric["loss"])  # mistake


model = Net()
trainer = Trainer(max_epoch=3)  # mistake
trainer = Trainer(devices=1.5)  # mistake
stopper = EarlyStopping("loss", patience="3")  # mistake
trainer = Trainer(max_epochs=3, callbacks=[Watcher(), stopper])
trainer.fit(model, train_dataloader=[torch.ones(2)])  # mistake
result = trainer.fit(model, [torch.ones(2)])
print(result.metric["loss"], ModelCheckpoint(monitor="loss").best_model_path)  # mistake
