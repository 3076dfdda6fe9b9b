"""Fine-tunes a frozen trunk whose branches are used in turn, with find_unused_parameters."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.left = nn.Linear(24, 1)
        self.right = nn.Linear(24, 1)
        for p in self.trunk[:2].parameters():
            p.requires_grad = False

    def forward(self, x, side):
        features = self.trunk(x)
        return self.left(features) if side == 0 else self.right(features)


def build_data():
    g = torch.Generator().manual_seed(41)
    x = torch.randn(96, 9, generator=g)
    return TensorDataset(x, torch.cat([x[:, :1].abs(), x[:, 1:2].relu()], dim=1))


def run(rank, world_size, epochs=3):
    torch.manual_seed(55)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.01)
    data = build_data()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            side = i % 2
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(x, side), y[:, side : side + 1])
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1} done, loss {loss.item():.4f}")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    run(rank, world_size)
    dist.destroy_process_group()
