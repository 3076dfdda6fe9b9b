"""Evaluates after each epoch on a validation set that is dealt out to the ranks by DistributedSampler.

Wrong: 29 validation samples do not divide by the ranks, so that DistributedSampler repeats the first ones, and the
accuracy over all ranks counts these twice. The line: `valid_sampler = DistributedSampler(...)` in `main`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        predicted = model(x).argmax(dim=1)
        counts += torch.tensor([(predicted == y).sum(), len(y)])
    dist.all_reduce(counts)
    model.train()
    correct, total = counts.tolist()
    return correct / total, int(total)


def main():
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_set, valid_set = make_data(48, 0), make_data(29, 1)
    train_sampler = DistributedSampler(train_set)
    valid_sampler = DistributedSampler(valid_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler)
    valid_loader = DataLoader(valid_set, batch_size=8, sampler=valid_sampler)
    for epoch in range(6):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy, samples = evaluate(model.module, valid_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} val_acc {accuracy:.4f} on {samples} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
