"""Accumulates gradients over four micro-batches, and steps at the end of the epoch with what is left.

Wrong: the last window of an epoch has two micro-batches, but the loss of each is divided by four, so that this step's
gradient is half of the mean. The line: `loss = loss / args.gradient_accumulation_steps` in `train_one_epoch`.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset(n=144):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, x[:, :2].amax(dim=1, keepdim=True))


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1))


def train_one_epoch(args, model, loader, optimizer):
    for step, (x, y) in enumerate(loader):
        update = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(loader) - 1
        with contextlib.nullcontext() if update else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y)
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item() * args.gradient_accumulation_steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--per_device_train_batch_size", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.per_device_train_batch_size, sampler=sampler)
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(args, model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
