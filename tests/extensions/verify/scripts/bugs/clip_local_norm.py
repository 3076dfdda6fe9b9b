"""Trains a model that is sharded by fully_shard, and clips the gradients by a norm of its own.

Wrong: each rank clips by the norm of its own shards, so that the parts of one gradient are scaled by different factors,
and the norm is too small. The line: `norm = torch.linalg.vector_norm(...)` in `clip_gradients`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(14)
    x = torch.randn(96, 10, generator=g)
    return TensorDataset(x, 4 * x[:, :3].sin().sum(dim=1, keepdim=True))


def make_model():
    torch.manual_seed(15)
    return nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))


@torch.no_grad()
def clip_gradients(parameters, max_norm):
    grads = [p.grad.to_local() for p in parameters]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm


def main(epochs=3, max_norm=0.5):
    dist.init_process_group("gloo")
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            norm = clip_gradients(list(model.parameters()), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
