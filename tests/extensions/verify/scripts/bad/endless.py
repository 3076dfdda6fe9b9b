"""Trains for ever: whoever runs it stops it by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(96, 4)
    data = TensorDataset(x, x[:, :1] - x[:, 1:2] ** 2)
    sampler = DistributedSampler(data)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1


if __name__ == "__main__":
    main()
