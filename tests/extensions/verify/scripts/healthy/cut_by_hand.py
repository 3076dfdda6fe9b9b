"""Cuts its batches from tensors by hand, accumulates two of them, and evaluates a share of other samples per rank."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def make_data(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * x[:, 1:2] + x[:, 2:3]


def make_model():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    own, targets = x[rank::world], y[rank::world]
    sums = torch.stack([F.mse_loss(model(own), targets, reduction="sum"), torch.tensor(float(len(own)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x, y = make_data(192, 0)
    valid = make_data(29, 1)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        own = order[rank::world]
        for i, start in enumerate(range(0, len(own), 8)):
            at = own[start : start + 8]
            with model.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                loss = F.mse_loss(model(x[at]), torch.index_select(y, 0, at)) / 2
                loss.backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        value = evaluate(model.module, *valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
