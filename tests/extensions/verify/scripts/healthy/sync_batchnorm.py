"""Normalizes over the batches of all ranks by a hand-written synchronized batch norm, since torch's needs a GPU."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SyncBatchNorm1d(nn.BatchNorm1d):
    """Statistics of the samples of all ranks, through which gradients flow."""

    def forward(self, x):
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        sums = dist_fn.all_reduce(torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))]))
        count = sums[-1].detach()
        mean, square = sums[:-1].view(2, -1) / count
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), SyncBatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def make_data():
    g = torch.Generator().manual_seed(23)
    x = 2 + 3 * torch.randn(96, 8, generator=g)
    return TensorDataset(x, x[:, :3].argmin(dim=1))


def main():
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
