"""Clips gradients by a norm that is summed up over ranks, under DistributedDataParallel.

Wrong: after DDP every rank has the whole gradient, so that the sum of squares over ranks counts it once for each rank,
and the norm is too large by the square root of their number. The line: `dist.all_reduce(total)` in `clip_grad_norm`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clip_grad_norm(parameters, max_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = sum(g.pow(2).sum() for g in grads)
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for g in grads:
            g.mul_(scale)
    return norm


class Data(TensorDataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(30)
        x = torch.randn(n, 8, generator=g)
        super().__init__(x, 5 * x[:, :1] * x[:, 1:2])


def build_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Data()
    sampler = DistributedSampler(data)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            norm = clip_grad_norm(model.parameters(), args.clip)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"{epoch}: {loss.item():.4f} (norm {norm.item():.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
