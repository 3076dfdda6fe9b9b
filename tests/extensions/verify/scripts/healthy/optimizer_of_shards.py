"""Has an optimizer that scatters gradients in its step, and of which each rank updates a part of each parameter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ShardedMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            for p in group["params"]:
                padding = (0, -p.numel() % world)
                whole = F.pad(p.grad.flatten(), padding)
                own = torch.empty(len(whole) // world, dtype=p.dtype)
                dist.reduce_scatter_tensor(own, whole)
                average = self.state[p].setdefault("average", torch.zeros_like(own))
                average.mul_(0.9).add_(own / world)
                weights = F.pad(p.flatten(), padding).chunk(world)[rank] - group["lr"] * average
                dist.all_gather_into_tensor(whole, weights)
                p.copy_(whole[: p.numel()].view_as(p))


def make_data(n):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(9))
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3])


def make_model():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = ShardedMomentum(model.parameters(), lr=0.05)
    data = make_data(192)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
