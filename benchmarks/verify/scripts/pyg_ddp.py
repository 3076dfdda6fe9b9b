"""PyG's distributed_batching example: graph classification with GIN, a loader of graphs and a DistributedSampler."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool


class GIN(nn.Module):
    def __init__(self, inputs=8, hidden=16, classes=3):
        super().__init__()
        self.conv1 = GINConv(nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
        self.conv2 = GINConv(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
        self.lin = nn.Linear(hidden, classes)

    def forward(self, x, edge_index, batch):
        x = self.conv2(self.conv1(x, edge_index).relu(), edge_index).relu()
        return self.lin(global_mean_pool(x, batch))


def graph():
    nodes = int(torch.randint(5, 12, ()))
    return Data(x=torch.randn(nodes, 8), edge_index=torch.randint(nodes, (2, 20)), y=torch.randint(3, (1,)))


dist.init_process_group("gloo")
torch.manual_seed(12345)
data = [graph() for _ in range(160)]
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(GIN())
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
