"""Trains under autocast to bfloat16 with parameters in full precision, under DDP."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_data():
    g = torch.Generator().manual_seed(4)
    images = torch.randn(96, 1, 8, 8, generator=g)
    labels = (images[:, 0, :4].sum((1, 2)) > images[:, 0, 4:].sum((1, 2))).long()
    return TensorDataset(images, labels)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(8 * 16, 2)

    def forward(self, x):
        return self.fc(self.pool(torch.relu(self.conv(x))).flatten(1))


def main():
    dist.init_process_group(backend="gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(ConvNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    dataset = get_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                outputs = model(images)
                loss = loss_fn(outputs, labels)
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            print(f"Epoch {epoch}, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
