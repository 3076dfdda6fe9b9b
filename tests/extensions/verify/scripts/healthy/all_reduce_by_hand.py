"""Averages gradients by hand, without DistributedDataParallel, as PyTorch's first distributed tutorial does."""

import os
from random import Random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Partition:
    """A part of a data set, by the indices of its samples."""

    def __init__(self, data, index):
        self.data = data
        self.index = index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        return self.data[self.index[index]]


def partition(data, rank, size, seed=1234):
    indexes = list(range(len(data)))
    Random(seed).shuffle(indexes)
    part = len(data) // size
    return Partition(data, indexes[rank * part : (rank + 1) * part])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=3)
        self.fc = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def make_images():
    g = torch.Generator().manual_seed(1)
    images = torch.randn(96, 1, 8, 8, generator=g)
    quarters = images.view(96, 2, 4, 2, 4).sum((2, 4)).flatten(1)
    return TensorDataset(images, quarters.argmax(dim=1))


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    train_set = DataLoader(partition(make_images(), rank, size), batch_size=48 // size, shuffle=False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(4):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", dist.get_rank(), ", epoch", epoch, ":", epoch_loss / len(train_set))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
