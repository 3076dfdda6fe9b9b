"""pytorch-metric-learning: DistributedLossWrapper and DistributedMinerWrapper around a triplet loss."""

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed as pml_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16)))
miner = pml_dist.DistributedMinerWrapper(miner=miners.MultiSimilarityMiner())
loss_fn = pml_dist.DistributedLossWrapper(loss=losses.ContrastiveLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(256, 20), torch.randint(8, (256,)))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, labels in DataLoader(data, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        embeddings = model(x)
        loss = loss_fn(embeddings, labels, miner(embeddings, labels))
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
