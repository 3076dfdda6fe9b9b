"""Trains two heads with three weighted losses, one of them on the weights, by a class that holds it all."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class TrainConfig:
    max_epochs: int = 3
    batch_size: int = 8
    lr: float = 0.02
    class_weight: float = 0.5
    decay: float = 1e-3


class Boxes(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(77)
        self.features = torch.randn(n, 14, generator=g)
        self.boxes = self.features[:, :4].cumsum(1)
        self.labels = self.features[:, 4:9].argmax(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], (self.boxes[i], self.labels[i])


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(14, 32), nn.ReLU())
        self.box_head = nn.Linear(32, 4)
        self.class_head = nn.Linear(32, 5)

    def forward(self, x):
        h = self.trunk(x)
        return {"box": self.box_head(h), "class": self.class_head(h)}


class Trainer:
    def __init__(self, config, model, dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.dataset = dataset
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, config.batch_size, sampler=self.sampler, shuffle=False)
        self.model = DDP(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)

    def losses(self, output, target):
        box, label = target
        return {
            "box": F.smooth_l1_loss(output["box"], box),
            "class": self.config.class_weight * F.cross_entropy(output["class"], label),
            "decay": self.config.decay * sum(p.square().sum() for p in self.model.module.trunk.parameters()),
        }

    def _run_batch(self, source, target):
        self.optimizer.zero_grad()
        losses = self.losses(self.model(source), target)
        sum(losses.values()).backward()
        self.optimizer.step()
        return {name: value.item() for name, value in losses.items()}

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for source, target in self.loader:
            losses = self._run_batch(source, target)
        print(f"[RANK {self.global_rank}] epoch {epoch} " + " ".join(f"{k} {v:.4f}" for k, v in losses.items()))

    def train(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    Trainer(TrainConfig(), Detector(), Boxes()).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
