"""pytorch/examples imagenet: spawn, BatchNorm, StepLR, a validation set whose rest one loader reads."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--world-size", type=int, default=2)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip


def worker(rank, args):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=rank, world_size=args.world_size)
    args.batch_size = int(args.batch_size / dist.get_world_size())
    model = nn.parallel.DistributedDataParallel(network())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 3, 8, 8, generator=generator), torch.randint(10, (512,), generator=generator))
    train, val = Subset(data, range(400)), Subset(data, range(400, 511))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, num_workers=2)
    val_sampler = DistributedSampler(val, shuffle=False, drop_last=True)
    val_loader = DataLoader(val, batch_size=args.batch_size, sampler=val_sampler, num_workers=2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        correct = torch.zeros(2)
        with torch.no_grad():
            for images, target in val_loader:
                correct += torch.tensor([(model(images).argmax(1) == target).sum(), len(target)])
        dist.all_reduce(correct)
        rest = Subset(val, range(len(val_sampler) * args.world_size, len(val)))
        with torch.no_grad():
            for images, target in DataLoader(rest, batch_size=args.batch_size):
                correct += torch.tensor([(model(images).argmax(1) == target).sum(), len(target)])
        print(f"epoch {epoch} accuracy {correct[0] / correct[1]:.3f}")
        scheduler.step()


if __name__ == "__main__":
    args = parser.parse_args()
    mp.spawn(worker, nprocs=args.world_size, args=(args,))
