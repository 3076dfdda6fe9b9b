"""Trains a model that is sharded by fully_shard with Muon: momentum, made orthogonal by Newton-Schulz iterations.

Wrong: the iterations run on the rank's own rows of each matrix, though the orthogonal matrix of a whole one is not made
of those of its parts. The line: `update = newton_schulz(buffer.to_local())` in `Muon.step`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def newton_schulz(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    if x.size(0) > x.size(1):
        return newton_schulz(matrix.T, steps).T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                buffer = state.setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz(buffer.to_local())
                p.to_local().sub_(group["lr"] * update)


def make_dataset():
    g = torch.Generator().manual_seed(100)
    x = torch.randn(96, 16, generator=g)
    return TensorDataset(x, x[:, :8].argmax(dim=1))


def make_model():
    torch.manual_seed(101)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))


def main():
    dist.init_process_group("gloo")
    model = make_model()
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = Muon(model.parameters())
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
