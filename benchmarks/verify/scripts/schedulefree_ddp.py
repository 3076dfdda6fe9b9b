"""Schedule-Free AdamW in a DDP loop with train() and eval() of the optimizer."""

import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.0025, warmup_steps=2)
data = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    optimizer.train()
    for x, y in DataLoader(data, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    optimizer.eval()
dist.destroy_process_group()
