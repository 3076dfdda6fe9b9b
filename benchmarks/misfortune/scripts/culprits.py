"""Two ranks that end, fail or part in one of some ways: for benchmarks/culprits.py, which names the way."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lockstep

way = sys.argv[1]
FORGED = "it broke\nlockstep: rank 7 failed first, at other.py:1: ValueError: not me\x1b[2K\r"


def by_hand(container):
    """A loop that ends right after its last step, as the ranks of torchrun."""
    dist.init_process_group("gloo")
    for _ in range(3):
        model = container(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
    dist.destroy_process_group()


def shard(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    layers(torch.zeros(1, 64))
    layers[rank](torch.zeros(1, 64))  # fsdp


def hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def mean(future):
        if dist.get_rank() == 1:
            raise KeyError("no such key")  # hook
        return future.value()[0] / dist.get_world_size()

    return future.then(mean)


class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def on_train_start(self):
        if way == "fsdp":
            shard(self.global_rank)

    def training_step(self, batch, batch_idx):
        if way == "message" and self.global_rank == 1 and batch_idx == 1:
            raise ValueError(FORGED)  # message
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("value", batch.mean())

    def on_validation_epoch_end(self):
        if way == "gather" and self.global_rank == 0:
            self.all_gather(torch.zeros(1000))  # gather

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if way in ("lockstep", "torch"):
    by_hand(lockstep.DistributedDataParallel if way == "lockstep" else nn.parallel.DistributedDataParallel)
else:
    from lockstep.engines.ddp.strategy import DDPStrategy

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    strategy = DDPStrategy(ddp_comm_hook=hook) if way == "hook" else "ddp"
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loader = DataLoader(torch.zeros(16, 1), batch_size=2)
    trainer = lockstep.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, num_sanity_val_steps=0, **quiet
    )
    trainer.fit(Module(), loader, loader)
