"""The DDP tutorial series: a Trainer class under torchrun that saves snapshots."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Samples(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, loader, optimizer, save_every):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.loader, self.optimizer, self.save_every = loader, optimizer, save_every
        self.model = DDP(model)

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, "snapshot.pt")


torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Linear(20, 1)
dataset = Samples(2048)
loader = DataLoader(dataset, batch_size=32, shuffle=False, sampler=DistributedSampler(dataset))
Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3), save_every=1).train(3)
dist.destroy_process_group()
