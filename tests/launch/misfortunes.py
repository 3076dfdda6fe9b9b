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
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL * rank)
        if what == "raise" and rank == 1:
            raise KeyError("no such column")  # raise
        if what == "deadlock":
            dist.recv(torch.zeros(1), 1 - rank)  # deadlock


def main():
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports torch's compiler, before ranks are forked
    data = DataLoader(Numbers(4000, fail if what == "bad sample" else None), batch_size=4, num_workers=workers)
    result = Trainer(max_steps=1000, **flags).fit(Unlucky(), data)
    os.write(1, f"result {result.stopped}\n".encode())


main()
