"""A training script on two ranks that do not do the same, or of which one takes its time: for test_hangs.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from troubled import Net, Numbers, flags, now, what, workers

from lockstep import Trainer

IS_ENDED = "ended" in sys.argv
LONG = 60 if IS_ENDED else 8


def sleep():
    time.sleep(8)  # loader


class Strays(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        if batch_idx == 5:
            if what != "loader":
                now()
            self.stray(self.global_rank)
        return self.layer(batch).mean()

    def stray(self, rank):
        one, two = torch.ones(4), torch.ones(4)
        if what == "order" and rank == 0:
            dist.all_reduce(one)  # order 0
            dist.broadcast(two, 0)
        if what == "order" and rank == 1:
            dist.broadcast(two, 0)  # order 1
            dist.all_reduce(one)
        if what == "operation":
            dist.all_reduce(one, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # operation 0, operation 1
        if what == "shape":
            dist.all_reduce(torch.ones(8 + rank))  # shape 0, shape 1
        if what == "later" and rank == 0:
            dist.all_reduce(one, async_op=True).wait()  # later 0
        if what == "later" and rank == 1:
            dist.barrier()  # later 1
        if what == "stopped" and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped 1
        if what == "long" and rank == 0:
            time.sleep(LONG)  # long 0


trainer = Trainer(max_epochs=1, limit_val_batches=0, hang_timeout=3, hang_kill=4 if IS_ENDED else None, **flags)
data = DataLoader(Numbers(2400, sleep if what == "loader" else None), batch_size=4, num_workers=workers)
print("result", trainer.fit(Strays(), data).stopped, flush=True)
