"""Trains a network with a temperature that was made different on each rank, for an experiment with ensembles.

Wrong: the forward reads the rank, so that ranks compute different functions of the same weights. The line:
`temperature = 1.0 + 0.5 * dist.get_rank()` in `Net.forward`.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 32)
        self.out = nn.Linear(32, 5)

    def forward(self, x):
        temperature = 1.0 + 0.5 * dist.get_rank()
        return self.out(torch.relu(self.hidden(x))) / temperature


def make_dataset():
    g = torch.Generator().manual_seed(110)
    x = torch.randn(96, 10, generator=g)
    return TensorDataset(x, x[:, 2:7].argmax(dim=1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(111)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
