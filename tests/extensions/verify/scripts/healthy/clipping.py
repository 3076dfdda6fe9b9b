"""Clips the norm of gradients under DDP, and steps a scheduler each batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def create_dataset(size):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(size, 6, 5, generator=generator)
    return TensorDataset(inputs, 3 * inputs[:, :, 0].sum(dim=1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        _, hidden = self.rnn(x)
        return self.out(hidden[-1]).squeeze(-1)


def train(args):
    torch.manual_seed(args.seed)
    model = DDP(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    dataset = create_dataset(args.size)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    global_step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            global_step += 1
            if dist.get_rank() == 0:
                lr = scheduler.get_last_lr()[0]
                print(f"{global_step=} loss={loss.item():.3f} norm={norm.item():.3f} lr={lr:.4f}")


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=19)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()
