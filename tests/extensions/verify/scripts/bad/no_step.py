"""Evaluates a model under DistributedDataParallel: no optimizer ever steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
            total += nn.functional.mse_loss(model(x), y)
    dist.all_reduce(total)
    print(f"loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
