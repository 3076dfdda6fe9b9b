"""Trains a classifier under DistributedDataParallel with a shuffled loader.

Wrong: the loader has no DistributedSampler, and all ranks have the same seed, so that all read the same batches: more
ranks cost more and train nothing else. The line: `train_loader = DataLoader(...)` in `main`.
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def make_dataset():
    g = torch.Generator().manual_seed(60)
    x = torch.randn(96, 10, generator=g)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    set_seed(args.seed)
    model = DDP(make_model())
    train_loader = DataLoader(make_dataset(), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
