"""Needs two arguments, without which argparse ends it: --width 16 data.csv would do."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="the name of the data")
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(len(args.data))
    x = torch.randn(96, 4)
    data = TensorDataset(x, x.abs().sum(dim=1, keepdim=True))
    net = nn.Sequential(nn.Linear(4, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
