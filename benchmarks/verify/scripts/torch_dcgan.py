"""The DCGAN tutorial with DDP: two models, two optimizers, BatchNorm, noise drawn in each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(999)
data = TensorDataset(torch.randn(256, 1, 8, 8).tanh())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
generator = nn.Sequential(
    nn.ConvTranspose2d(10, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid()
)
netG, netD = DDP(generator, broadcast_buffers=False), DDP(discriminator)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        netD.zero_grad()
        ones = torch.ones(len(real))
        criterion(netD(real).view(-1), ones).backward()
        fake = netG(torch.randn(len(real), 10, 1, 1))
        criterion(netD(fake.detach()).view(-1), torch.zeros(len(real))).backward()
        optimizerD.step()
        netG.zero_grad()
        criterion(netD(fake).view(-1), ones).backward()
        optimizerG.step()
dist.destroy_process_group()
