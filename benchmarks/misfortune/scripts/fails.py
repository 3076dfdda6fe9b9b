"""A training script in which one rank fails, in one of twelve ways; runs with lockstep and with Lightning.

    python fails.py CASE --rank 1 --devices 2 --strategy ddp --nodes 1

The file named by the variable EVENT gets the time (of `time.monotonic`) at which it happens.
"""

import argparse
import importlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

library = importlib.import_module(os.environ.get("LIBRARY", "lockstep"))
callbacks = importlib.import_module(f"{library.__name__}.callbacks")


def happens(again=False):
    """The benchmark measures from here, or from the last time."""
    event = Path(os.environ["EVENT"])
    if again or not event.exists():
        event.write_text(f"{time.monotonic():.4f}")


def take_memory():
    """More and more of it, until the system ends this process.

    MEMORY names a control group with a limit, which this process joins, or is empty where the benchmark could not
    make one. Then nothing but the end is as in earnest: SIGKILL, from this process itself.
    """
    group = os.environ.get("MEMORY", "")
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(2)  # a rank is in its cgroup for longer than a moment
    taken = []
    for _ in range(100):
        happens(again=True)
        taken.append(b"1" * 1_000_000)  # memory
    os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset):
    """Vectors of 8 numbers; from one on they cannot be read."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index >= self.bad:
            happens()
            raise OSError(f"sample {index} cannot be read")  # worker
        return torch.full((8,), index / 4000)


class Net(library.LightningModule):
    """A model of 80 parameters."""

    def __init__(self, case, failing):
        super().__init__()
        self.case, self.failing = case, failing
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    @property
    def is_now(self):
        return self.global_rank == self.failing and self.global_step == 20

    def train_dataloader(self):
        in_worker = self.case == "worker"
        bad = 160 if in_worker and self.global_rank == self.failing else 4000
        return DataLoader(Samples(bad), batch_size=4, num_workers=2 if in_worker else 0)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        if self.is_now:
            self.fail()
        return self.net(batch).square().mean()

    def fail(self):
        if self.case == "exception":
            happens()
            raise KeyError("no such label")  # exception
        if self.case == "killed":
            happens()
            os.kill(os.getpid(), signal.SIGKILL)  # killed
        if self.case == "stopped":
            happens()
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        if self.case == "exit":
            happens()
            os._exit(0)  # exit
        if self.case == "memory":
            take_memory()

    def on_save_checkpoint(self, checkpoint):
        if self.case == "save" and self.global_rank == self.failing:
            happens()
            raise OSError("no space left on device")  # save

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Failing(library.Callback):
    """Fails at the end of a batch."""

    def on_train_batch_end(self, trainer, module, *args):
        if module.case == "callback" and module.is_now:
            happens()
            raise ZeroDivisionError("no samples were counted")  # callback


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    if args.case == "early" and os.environ.get("LOCAL_RANK", "0") == str(args.rank):
        happens()
        raise FileNotFoundError("the labels are not on this machine")  # early
    trainer = library.Trainer(
        accelerator=os.environ.get("LOCKSTEP_TEST_ACCELERATOR", "cpu"),
        devices=args.devices,
        strategy=args.strategy,
        num_nodes=args.nodes,
        max_epochs=1,
        logger=False,
        callbacks=[Failing(), callbacks.ModelCheckpoint(every_n_train_steps=20, save_top_k=-1)],
    )
    trainer.fit(Net(args.case, args.rank))


if __name__ == "__main__":
    main()
