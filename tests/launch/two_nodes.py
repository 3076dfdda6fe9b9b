"""A training script on two nodes of one rank each, in which one does what no rank should: for test_both_screens.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import FSDPStrategy

what, strategy = sys.argv[1:]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        if batch_idx == 5:
            self.go(self.global_rank)
        return self.layers(batch[0]).mean()  # layers

    def go(self, rank):
        if what == "barrier" and rank == 0:
            dist.barrier()  # barrier
        if what == "shape":
            dist.all_reduce(torch.ones(2 + 1000 * rank))  # shape
        if what == "stopped" and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        if what == "caught" and rank == 1:
            raise KeyError("no such label")  # caught
        if what == "raise" and rank == 1:
            raise ValueError("no such label")  # raise
        if what == "left" and rank == 1:
            raise SystemExit(0)  # left
        if what == "gone" and rank == 0:
            raise SystemExit(0)  # gone
        if what == "all leave":
            raise SystemExit(0)

    def on_fit_end(self):
        if what == "one leaves at the end" and self.global_rank == 1:
            raise SystemExit(0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main():
    saves = ModelCheckpoint(dirpath="saved", every_n_train_steps=3)
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}) if strategy == "fsdp" else strategy,
        max_epochs=1,
        hang_timeout=60,
        callbacks=[saves],
        **flags,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(400, 4)), 2))


try:
    main()  # fit
except KeyError:
    time.sleep(60)  # and the other node waits
