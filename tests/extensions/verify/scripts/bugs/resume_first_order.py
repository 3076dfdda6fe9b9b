"""Trains with a checkpoint after each epoch, and goes on from it when it is started again.

Wrong: epochs are counted from zero again after a resume, so that the sampler repeats the order of epoch 0 and so on. It
shows with --resume only. The line: `for epoch in range(args.epochs - done):` in `main`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(90)
    x = torch.randn(48, 6, generator=g)
    return TensorDataset(x, x[:, :3].mean(dim=1, keepdim=True).tanh())


def make_model():
    torch.manual_seed(91)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))


def save(path, model, optimizer, done):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": done}
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    done = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
    for epoch in range(args.epochs - done):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(args.checkpoint, model, optimizer, done + epoch + 1)
        if dist.get_rank() == 0:
            print(f"epoch {done + epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
