"""Accumulates gradients over three micro-batches, and averages them over ranks by hand.

Wrong: the gradients that have been accumulated so far are all-reduced after each micro-batch, so that those of earlier
ones are reduced again and again, and the mean of a rank's sum is mixed with other ranks' newest. With the sum instead
of the mean, as here, and a division at the end, earlier gradients are doubled with each further micro-batch. The line:
the call `sum_gradients(model)` in `main`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION_STEPS = 3


def get_dataset():
    g = torch.Generator().manual_seed(40)
    x = torch.randn(144, 9, generator=g)
    return TensorDataset(x, x @ torch.randn(9, 2, generator=g) + 0.1 * torch.randn(144, 2, generator=g))


def get_model():
    torch.manual_seed(41)
    return nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 2))


def sum_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = get_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    dataset = get_dataset()
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATION_STEPS
            loss.backward()
            sum_gradients(model)
            if (i + 1) % ACCUMULATION_STEPS == 0:
                for p in model.parameters():
                    p.grad /= world_size
                optimizer.step()
                optimizer.zero_grad()
        print(f"rank {rank} epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
