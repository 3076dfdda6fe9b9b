"""Trains an MLP with tensor parallelism by hand: a column-parallel layer, then a row-parallel one.

Wrong: the row-parallel layer adds its bias on each rank before the partial outputs are summed, so that the bias counts
once for each rank. The line: `partial = F.linear(x, self.weight, self.bias)` in `RowParallelLinear.forward`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CopyToRanks(torch.autograd.Function):
    """Hands its input on; the backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    """Sums its input over the ranks; the backward hands the gradient on."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnParallelLinear(nn.Module):
    def __init__(self, full):
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full.weight.detach().chunk(world_size, dim=0)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(world_size)[rank].clone())

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, full):
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full.weight.detach().chunk(world_size, dim=1)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x):
        partial = F.linear(x, self.weight, self.bias)
        return SumOverRanks.apply(partial)


class ParallelMLP(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.up = ColumnParallelLinear(first)
        self.down = RowParallelLinear(second)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def full_layers():
    torch.manual_seed(5)
    return nn.Linear(8, 48), nn.Linear(48, 2)


def make_dataset():
    g = torch.Generator().manual_seed(70)
    x = torch.randn(128, 8, generator=g)
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1))


def main():
    dist.init_process_group("gloo")
    model = ParallelMLP(*full_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # All ranks of a tensor-parallel group read the same batches.
    loader = DataLoader(make_dataset(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
