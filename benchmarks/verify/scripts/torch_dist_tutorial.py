"""Writing distributed applications: a partitioned data set, gradients averaged by hand, the batch divided by ranks."""

from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Partition(Dataset):
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        return self.data[self.index[index]]


def partition_dataset(data):
    size = dist.get_world_size()
    indexes = list(range(len(data)))
    Random(1234).shuffle(indexes)
    part = len(indexes) // size
    own = Partition(data, indexes[dist.get_rank() * part : (dist.get_rank() + 1) * part])
    return DataLoader(own, batch_size=int(64 / size), shuffle=True)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(1234)
data = [(torch.randn(16), int(torch.randint(4, ()))) for _ in range(640)]
loader = partition_dataset(data)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4), nn.LogSoftmax(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
for epoch in range(2):
    epoch_loss = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        epoch_loss += loss.item()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print(f"Rank {dist.get_rank()}, epoch {epoch}: {epoch_loss / len(loader):.4f}")
dist.destroy_process_group()
