"""TorchMetrics in a DDP loop: metrics that the ranks synchronize in compute()."""

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(42)
model = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
metric = torchmetrics.classification.Accuracy(task="multiclass", num_classes=5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(320, 20), torch.randint(5, (320,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=20, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric(output.softmax(-1), y)
    print(f"epoch {epoch}: accuracy on all ranks {metric.compute():.4f}")
    metric.reset()
dist.destroy_process_group()
