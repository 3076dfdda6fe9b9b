"""A training script on two ranks that saves to one path again and again: for test_files.py."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningModule, Trainer
from lockstep.strategies import FSDPStrategy

what, path = sys.argv[1:]
WIDTH = 400 if what == "fills the disk" else 4


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saves(Callback):
    """Behind the second step, which holds, and behind the fourth, when a rank dies in its write."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if what == "fills the disk":
            trainer.save_checkpoint(f"{path}/{batch_idx}.ckpt")
        elif batch_idx in (1, 3):
            if batch_idx == 3 and trainer.global_rank == 1:
                die_in_a_write()
            trainer.save_checkpoint(path)


def die_in_a_write():
    """From now on what this rank writes of a checkpoint kills it in the middle."""
    from torch.distributed.checkpoint import filesystem

    def write(stream, tensor, *args, **kwargs):
        os.write(2, b"dies in a write\n")
        os._exit(9)

    filesystem._write_item = write
    torch.save = write


trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp" if what == "fills the disk" else FSDPStrategy(state_dict_type="sharded"),
    max_epochs=1,
    callbacks=[Saves()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=2))
print("ended", trainer.global_rank, flush=True)
