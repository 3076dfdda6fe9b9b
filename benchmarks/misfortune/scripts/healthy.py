"""A healthy training on two ranks that often wait for each other: nothing may take it for a hang.

    python healthy.py --seconds 60 --timeout 3

A rank is slow in a step, reads a slow sample, validates longer than the other, or works alone at the end of an epoch:
in turns, and each time for longer than ``hang_timeout``. Prints how often, at the end.
"""

import argparse
import inspect
import math
import subprocess
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep import Callback, LightningModule, Trainer

PAUSES = 4
"""Of one rank in an epoch, while the other waits."""


class Samples(Dataset):
    """Vectors of 8 numbers; one of them takes long."""

    def __init__(self, slow, seconds):
        self.slow, self.seconds = slow, seconds

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == self.slow:
            time.sleep(self.seconds)
        return torch.full((8,), index / 80)


class Net(LightningModule):
    """A model of 80 parameters."""

    def __init__(self, pause):
        super().__init__()
        self.pause, self.waits = pause, 0
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def rest(self, rank):
        """One rank pauses."""
        self.waits += 1
        if self.global_rank == rank:
            time.sleep(self.pause)

    def train_dataloader(self):
        return DataLoader(Samples(50, self.pause), batch_size=4)

    def val_dataloader(self):
        return DataLoader(Samples(-1, 0), batch_size=4)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.rest(1)
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.rest(self.current_epoch % 2)
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Pictures(Callback):
    """Work of rank 0 alone, in a process of its own, and then a meeting of all."""

    def on_train_epoch_end(self, trainer, module):
        module.waits += 1
        if trainer.is_global_zero:
            subprocess.run(["sleep", str(module.pause)], check=True)
        trainer.strategy.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--timeout", type=float, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    args = parser.parse_args()
    flags = {"hang_timeout": args.timeout}
    pause = 1.5 * args.timeout
    net = Net(pause)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=math.ceil(args.seconds / (PAUSES * pause)),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Pictures()],
        num_sanity_val_steps=0,
        **{name: value for name, value in flags.items() if name in inspect.signature(Trainer).parameters},
    )
    trainer.fit(net)
    if trainer.is_global_zero:
        waits = net.waits + trainer.current_epoch  # the slow samples are not counted where they are read
        print(f"healthy: {trainer.global_step} steps, {waits} waits of {pause:g} s")


if __name__ == "__main__":
    main()
