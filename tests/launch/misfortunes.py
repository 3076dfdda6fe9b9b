"""A training script on two ranks in which one of them does what no rank should: for test_misfortunes.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep import LightningModule, Trainer

what, strategy, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])


def now():
    """The test measures from here."""
    os.write(1, f"now {time.monotonic():.2f}\n".encode())


class Numbers(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if what == "bad sample" and self.on_one and index == 41:
            now()
            raise ValueError("no such label")  # bad sample
        return torch.full((1,), float(index))

    on_one = True


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        if batch_idx == 5:
            now()
            self.misfortune(self.global_rank)
        return self.layer(batch).mean()

    def misfortune(self, rank):
        if what == "exit" and rank == 1:
            sys.exit(0)  # exit
        if what == "hard exit" and rank == 1:
            os._exit(0)
        if what == "save" and rank == 0:
            self.trainer.save_checkpoint("never.ckpt")  # save
        if what == "barrier" and rank == 1:
            self.trainer.strategy.barrier()  # barrier
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL * rank)
        if what in ("raise", "caught") and rank == 1:
            raise KeyError("no such column")  # raise, caught
        if what == "deadlock":
            dist.recv(torch.zeros(1), 1 - rank)  # deadlock

    def validation_step(self, batch, batch_idx):
        time.sleep(0.02)
        if batch_idx == 5:
            now()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


def main():
    early = what == "early" and os.environ.get("LOCAL_RANK") == "1"
    data = DataLoader(Numbers(), batch_size=4, num_workers=workers)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=6 if early else 12 if what == "early" else 1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1.0 if what == "validate" else 0,
    )
    if what == "validate":
        trainer.validate(Net(), data)
    result = trainer.fit(Net(), data)  # early
    os.write(1, f"result {result.stopped}\n".encode())


try:
    main()
except KeyError:
    if what != "caught":
        raise
    time.sleep(60)
