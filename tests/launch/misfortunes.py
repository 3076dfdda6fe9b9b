"""A training script on two ranks in which one of them does what no rank should: for test_misfortunes.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from troubled import Net, Numbers, flags, now, what, workers

from lockstep import Trainer


def fail():
    raise ValueError("no such label")  # bad sample


class Unlucky(Net):
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


def main():
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports torch's compiler, before ranks are forked
    early = what == "early" and os.environ.get("LOCAL_RANK") == "1"
    data = DataLoader(Numbers(4000, fail if what == "bad sample" else None), batch_size=4, num_workers=workers)
    steps = 6 if early else 12 if what == "early" else 1000
    trainer = Trainer(max_steps=steps, limit_val_batches=1.0 if what == "validate" else 0, **flags)
    if what == "validate":
        trainer.validate(Unlucky(), data)
    result = trainer.fit(Unlucky(), data)  # early
    os.write(1, f"result {result.stopped}\n".encode())


try:
    main()
except KeyError:
    if what != "caught":
        raise
    time.sleep(60)
