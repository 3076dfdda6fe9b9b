"""Accumulates two micro-batches a step under DistributedDataParallel, and saves communication by no_sync.

Wrong: every backward runs under no_sync, the last one of a window, too, so that gradients are never synchronized. The
line: `with model.no_sync():` in `main`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(50)
    x = torch.randn(192, 5, generator=g)
    return TensorDataset(x, x.pow(2).sum(dim=1, keepdim=True))


def make_model():
    torch.manual_seed(51)
    return nn.Sequential(nn.Linear(5, 40), nn.Softplus(), nn.Linear(40, 1))


def main():
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            with model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss.backward()
            if i % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, loss {2 * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
