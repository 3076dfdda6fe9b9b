"""Averages gradients by hand, with a seed for each rank, so that augmentation differs between ranks.

Wrong: the seed is set before the model is made, and nothing broadcasts its weights: each rank begins with weights of
its own, and they stay different for ever. The line: `torch.manual_seed(args.seed + rank)` in `main`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(120)
    x = torch.randn(96, 8, generator=g)
    return TensorDataset(x, (x[:, :2].sum(dim=1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"rank {rank} epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
