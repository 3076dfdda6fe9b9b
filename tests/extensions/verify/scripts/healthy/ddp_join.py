"""Trains on files of different lengths, one list of batches a rank, with DDP's join for the ranks that run out."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def make_dataset(n=104):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 10, generator=generator)
    y = x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]
    return TensorDataset(x, y)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    # 13 batches of 8: some ranks have one more than others.
    dataset = make_dataset()
    batches = list(range(0, len(dataset), 8))[rank::world_size]
    mine = [i for start in batches for i in range(start, start + 8)]
    loader = DataLoader(Subset(dataset, mine), batch_size=8, shuffle=False)

    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(divide_by_initial_world_size=False):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {len(loader)} batches, loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
