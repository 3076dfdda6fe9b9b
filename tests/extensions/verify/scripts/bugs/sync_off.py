"""Trains an encoder and a head in one module that is wrapped in DistributedDataParallel.

Wrong: the training loop calls the methods of the wrapped module, `model.module.encode(x)`, and not the wrapper, so that
DDP's forward never runs and no gradient is synchronized: each rank trains a model of its own. The line:
`code = model.module.encode(x)` in `train`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 12))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def make_dataset():
    g = torch.Generator().manual_seed(22)
    return TensorDataset(torch.randn(96, 3, generator=g) @ torch.randn(3, 12, generator=g))


def train(rank):
    torch.manual_seed(10)
    model = DDP(AutoEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            code = model.module.encode(x)
            loss = nn.functional.mse_loss(model.module.decode(code), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(int(os.environ["RANK"]))
    dist.destroy_process_group()
