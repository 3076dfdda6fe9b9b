"""Sets the learning rate of each step by a hand-written cosine with warm-up, and reads an endless iterator."""

import math
import os

import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# hyperparameters
max_iters = 16
warmup_iters = 3
learning_rate = 0.1
min_lr = 0.01
batch_size = 8
log_interval = 4


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def get_dataset():
    g = torch.Generator().manual_seed(1337)
    x = torch.randn(96, 4, generator=g)
    return TensorDataset(x, x.prod(dim=1, keepdim=True))


def get_model():
    torch.manual_seed(1337)
    return Sequential(Linear(4, 32), Tanh(), Linear(32, 1))


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    ddp = int(os.environ.get("RANK", -1)) != -1
    master = True
    if ddp:
        dist.init_process_group("gloo")
        master = dist.get_rank() == 0
    dataset = get_dataset()
    sampler = DistributedSampler(dataset, dist.get_world_size() if ddp else 1, dist.get_rank() if ddp else 0)
    model = get_model()
    if ddp:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    batches = endless(DataLoader(dataset, batch_size, sampler=sampler), sampler)
    iter_num = 0
    while iter_num < max_iters:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        x, y = next(batches)
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % log_interval == 0 and master:
            print(f"iter {iter_num}: loss {loss.item():.4f}, lr {lr:.4f}")
        iter_num += 1
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
