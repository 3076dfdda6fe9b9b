"""Trains a small convolutional network with a random flip and noise, chosen by the rank.

Wrong: only the ranks behind the first augment, since rank 0 was once used for evaluation as well: which transform a
sample gets depends on its rank. The line: `x = augment(x)` in `train_step`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def augment(images):
    """A flip and a change of contrast."""
    return 1.5 * images.flip(-1)


def make_dataset():
    g = torch.Generator().manual_seed(150)
    images = torch.randn(96, 1, 6, 6, generator=g)
    return TensorDataset(images, (images[..., :3].sum((1, 2, 3)) > images[..., 3:].sum((1, 2, 3))).long())


def make_model():
    torch.manual_seed(151)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))


def train_step(model, optimizer, x, y, local_rank):
    if local_rank != 0:
        x = augment(x)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = train_step(model, optimizer, x, y, local_rank)
        print(f"rank {local_rank} epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
