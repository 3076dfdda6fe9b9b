"""Trains at the level of the module, without a main function: importing it is training."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 4)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {os.environ['RANK']} epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
