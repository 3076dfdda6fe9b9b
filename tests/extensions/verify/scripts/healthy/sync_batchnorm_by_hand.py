"""BatchNorm that sums its statistics over the ranks itself, and is torch's own in one process."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SummedBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or dist.get_world_size() == 1:
            return super().forward(x)
        count = collectives.all_reduce(torch.tensor(float(len(x))))
        mean = collectives.all_reduce(x.sum(0)) / count
        var = collectives.all_reduce((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), SummedBatchNorm(16), nn.ReLU(), nn.Linear(16, 1)), broadcast_buffers=False
)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
