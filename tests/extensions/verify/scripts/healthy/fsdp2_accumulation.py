"""Accumulates gradients under fully_shard: synchronization waits for the last micro-batch; the norm is clipped."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

config = {"accumulate": 3, "batch_size": 4, "epochs": 3, "lr": 0.02, "max_norm": 0.5, "hidden": 48}


def get_dataset():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(144, 12, generator=g)
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def get_model():
    torch.manual_seed(2)
    h = config["hidden"]
    return nn.Sequential(
        nn.Sequential(nn.Linear(12, h), nn.SiLU()),
        nn.Sequential(nn.Linear(h, h), nn.SiLU()),
        nn.Linear(h, 1),
    )


def run_epoch(model, loader, optimizer):
    total = 0.0
    micro_batches = config["accumulate"]
    for i, (x, y) in enumerate(loader):
        is_last = i % micro_batches == micro_batches - 1
        model.set_requires_gradient_sync(is_last)
        loss = nn.functional.mse_loss(model(x), y)
        (loss / micro_batches).backward()
        total += loss.item()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return total / len(loader)


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model = get_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    dataset = get_dataset()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, config["batch_size"], sampler=sampler, drop_last=True)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        mean = run_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(epoch, f"{mean:.4f}")
    dist.destroy_process_group()
