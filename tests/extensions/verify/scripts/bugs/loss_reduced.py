"""Shows the mean loss of all ranks, under DistributedDataParallel.

Wrong: the loss is all-reduced in place and divided by the number of ranks before its backward, so that gradients are
divided by it once more than DDP does. The line: `loss = loss / world_size` in `main`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(140)
    x = torch.randn(96, 12, generator=g)
    return TensorDataset(x, x[:, ::4].sum(dim=1, keepdim=True))


def make_model():
    torch.manual_seed(141)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))


def main():
    dist.init_process_group("gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            dist.all_reduce(loss.data)
            loss = loss / world_size
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mean loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
