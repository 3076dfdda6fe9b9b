"""Trains a generative adversarial network on points of a ring: two models, each under DDP, two optimizers."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Ring(Dataset):
    """Points of a ring, each with the noise that the generator turns into its rival."""

    def __init__(self, n, latent):
        g = torch.Generator().manual_seed(9)
        angle = 2 * math.pi * torch.rand(n, generator=g)
        self.points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)
        self.noise = torch.randn(n, latent, generator=g)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"real": self.points[index], "noise": self.noise[index]}


def make_generator(latent):
    return nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 2))


def make_discriminator():
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latent", type=int, default=6)
    parser.add_argument("--n-epochs", type=int, default=2)
    opt = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(13)
    net_g = DDP(make_generator(opt.latent))
    net_d = DDP(make_discriminator(), broadcast_buffers=False)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    dataset = Ring(96, opt.latent)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    for epoch in range(opt.n_epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            real, noise = batch["real"], batch["noise"]
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

            # (1) the discriminator: real points and detached fakes
            net_d.zero_grad()
            fake = net_g(noise)
            loss_d = criterion(net_d(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
            loss_d.backward()
            optimizer_d.step()

            # (2) the generator: it wants its fakes to be taken for real ones
            net_g.zero_grad()
            net_d.requires_grad_(False)
            loss_g = criterion(net_d.module(fake), ones)
            loss_g.backward()
            optimizer_g.step()
            net_d.requires_grad_(True)
            if dist.get_rank() == 0:
                print(f"[{epoch}/{opt.n_epochs}][{i}/{len(loader)}] D {loss_d.item():.4f} G {loss_g.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
