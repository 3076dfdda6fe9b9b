"""Trains with a linear decay of the learning rate, through a wrapper of the scheduler as libraries have it.

Wrong: the wrapper steps the scheduler once for each rank, so that the learning rate decays as many times too fast. The
line: `self.scheduler.step()` in `PreparedScheduler.step`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PreparedScheduler:
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self):
        for _ in range(dist.get_world_size()):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()


def make_dataset():
    g = torch.Generator().manual_seed(130)
    x = torch.randn(96, 4, generator=g)
    return TensorDataset(x, torch.cos(x).sum(dim=1, keepdim=True))


def make_model():
    torch.manual_seed(131)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = PreparedScheduler(LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=18))
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
