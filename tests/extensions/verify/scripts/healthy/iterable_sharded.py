"""Reads an endless-looking stream that each rank shards by itself, as web-scale loaders do."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Records of a stream; this rank takes every world_size-th."""

    def __init__(self, rank, world_size, total=160):
        self.rank = rank
        self.world_size = world_size
        self.total = total

    def record(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.rand(6, generator=g)
        return x, (x * x).sum().unsqueeze(0)

    def __iter__(self):
        for i in itertools.islice(range(self.total), self.rank, None, self.world_size):
            yield self.record(i)


def build():
    torch.manual_seed(21)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))


def main():
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(build())
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(Stream(rank, world_size), batch_size=5)
    running = 0.0
    for step, (x, y) in enumerate(loader, start=1):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {running / step:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
