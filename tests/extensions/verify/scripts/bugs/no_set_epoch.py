"""Trains for several epochs with a DistributedSampler that shuffles.

Wrong: `sampler.set_epoch(epoch)` is never called, so that each epoch has the order of the first, and each batch the
same samples for ever. The line: the loop `for epoch in range(...)` in `main`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(80)
    x = torch.randn(48, 6, generator=g)
    return TensorDataset(x, x[:, :1].exp() - x[:, 1:2])


def make_model():
    torch.manual_seed(81)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
