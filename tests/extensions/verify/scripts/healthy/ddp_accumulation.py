"""Accumulates gradients over four micro-batches under DistributedDataParallel, with no_sync on all but the last."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATE = 4
BATCH_SIZE = 4
EPOCHS = 3


class Sines(Dataset):
    """Pairs of a number and a sum of its sines."""

    def __init__(self, n=192):
        self.x = torch.linspace(-3, 3, n).unsqueeze(1)
        self.y = torch.sin(self.x) + 0.3 * torch.sin(3 * self.x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(torch.nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.fc1 = torch.nn.Linear(1, hidden)
        self.fc2 = torch.nn.Linear(hidden, hidden)
        self.fc3 = torch.nn.Linear(hidden, 1)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        return self.fc3(x)


def train():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = Sines()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, drop_last=True)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            last = (step + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(x), y) / ACCUMULATE
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"[{epoch + 1}/{EPOCHS}] loss={loss.item() * ACCUMULATE:.5f}")


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    train()
    dist.destroy_process_group()
