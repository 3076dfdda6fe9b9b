"""Keeps an exponential moving average of the weights beside a model under DDP, and evaluates with it."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.copy_(self.decay * ema + (1 - self.decay) * new)


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).to(x.dtype))


def make_model():
    torch.manual_seed(31)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


@torch.no_grad()
def evaluate(model, loader):
    loss, count = torch.zeros(()), torch.zeros(())
    for x, y in loader:
        loss += nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        count += len(x)
    dist.all_reduce(loss)
    dist.all_reduce(count)
    return (loss / count).item()


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    ema = ModelEma(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train, valid = make_data(96, 0), make_data(48, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 8, sampler=sampler)
    valid_loader = DataLoader(valid, 8, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model.module)
        value = evaluate(ema.module, valid_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the average on {len(valid)} samples {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
