"""Computes the activations of each block again in the backward, under DDP."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.body(x)


class DeepNet(nn.Module):
    def __init__(self, width=32, depth=6, use_checkpoint=True):
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.blocks = nn.ModuleList([ResidualBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)
        self.use_checkpoint = use_checkpoint

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint else block(x)
        return self.head(x)


def build_dataset():
    g = torch.Generator().manual_seed(17)
    x = torch.randn(96, 10, generator=g)
    return TensorDataset(x, x.abs().amax(dim=1, keepdim=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100)
    net = DDP(DeepNet())
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=8, sampler=sampler):
            opt.zero_grad()
            loss = nn.functional.smooth_l1_loss(net(x), y)
            loss.backward()
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item())
    dist.destroy_process_group()
