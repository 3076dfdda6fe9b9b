"""A training script in which one rank does one of many things that end a run, under one of several engines.

python randoms.py ENGINE WORLD FAULT RANK FOLDER
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import lockstep as L
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import BalancedStrategy, FSDPStrategy

engine, world, fault, failing, folder = sys.argv[1:]
WHEN = 5


class Numbers(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        if fault == "worker" and get_worker_info() is not None and index % 64 > 40 and int(RANK()) == int(failing):
            raise OSError("this sample cannot be read")  # worker
        return torch.full((6,), index / 256)


def RANK():
    return os.environ.get("RANK") or str(dist.get_rank() if dist.is_initialized() else RANKS[0])


RANKS = ["-1"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value):
        return torch.tanh(self.layer(value))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.head = (
            nn.Linear(6, 8),
            nn.Sequential(*[Block() for _ in range(4)]),
            nn.Linear(8, 1),
        )
        self.weight_of_disk = nn.Parameter(torch.zeros(400_000)) if fault == "disk" else None

    @property
    def fails_now(self):
        return self.global_rank == int(failing) and self.current_epoch == 0

    def training_step(self, batch, batch_idx):
        RANKS[0] = str(self.global_rank)
        time.sleep(0.005)
        if batch_idx == WHEN and self.fails_now:
            self.go()
        elif batch_idx == WHEN and fault == "shape" and self.current_epoch == 0:
            dist.all_reduce(torch.ones(3))
        value = self.blocks(self.into(batch))
        if fault == "backward" and batch_idx == WHEN and self.fails_now and value.requires_grad:
            value.register_hook(raises)
        loss = (self.head(value) - 1).square().mean()
        if self.weight_of_disk is not None:
            loss = loss + 0 * self.weight_of_disk.sum()
        self.log("loss", loss)
        return loss

    def go(self):
        if fault == "forward":
            raise KeyError("no such label")  # forward
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "crashed":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        if fault == "exit":
            os._exit(7)
        if fault == "barrier":
            dist.barrier()  # barrier
        if fault == "gather":
            self.all_gather(torch.ones(2))  # gather
        if fault == "shape":
            dist.all_reduce(torch.ones(2000))  # shape

    def on_before_zero_grad(self, optimizer):
        if fault == "hook" and self.global_step >= WHEN and self.fails_now:
            raise LookupError("in a hook")  # hook

    def validation_step(self, batch, batch_idx):
        if fault == "validation" and batch_idx == 1 and self.global_rank == int(failing):
            raise ValueError("validation broke")  # validation

    def on_save_checkpoint(self, checkpoint):
        if fault == "save" and self.global_rank == int(failing):
            raise PermissionError("this folder is somebody else's")  # save

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def raises(gradient):
    raise ArithmeticError("the gradient went wrong")  # backward


class Counts(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if fault == "callback" and batch_idx == WHEN and module.fails_now:
            raise ZeroDivisionError("nothing was counted")  # callback


def strategy():
    if engine == "fsdp":
        return FSDPStrategy(auto_wrap_policy={Block})
    if engine == "sharded":
        return FSDPStrategy(state_dict_type="sharded")
    if engine == "balanced":
        return BalancedStrategy(stages=2, chain="blocks", micro_batches=2)
    return engine


def main():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(world),
        num_nodes=int(os.environ.get("NODES", "1")),
        strategy=strategy(),
        max_epochs=2,
        hang_timeout=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_last=True), Counts()],
    )
    workers = 1 if fault == "worker" else 0
    train = DataLoader(Numbers(), 8, num_workers=workers)
    trainer.fit(Net(), train, None if engine == "balanced" else DataLoader(Numbers(), 16))  # fit
    print("ended well", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
