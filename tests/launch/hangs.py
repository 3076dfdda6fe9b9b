"""A training script on two ranks that do not do the same, or of which one takes its time: for test_hangs.py."""

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
        return 2400

    def __getitem__(self, index):
        if what == "loader" and index == 41:
            now()
            time.sleep(8)  # loader
        return torch.full((1,), float(index))


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

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
            time.sleep(8)  # long 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    limit_val_batches=0,
    hang_timeout=3,
    hang_kill=4 if "ended" in sys.argv else None,
)
print("result", trainer.fit(Net(), DataLoader(Numbers(), batch_size=4, num_workers=workers)).stopped, flush=True)
