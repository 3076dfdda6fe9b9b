"""The Join tutorial: ranks with different numbers of batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(53, 8), torch.randn(53, 1))
share = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
for _epoch in range(2):
    loader = DataLoader(share, batch_size=4)
    with Join([model]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
dist.destroy_process_group()
