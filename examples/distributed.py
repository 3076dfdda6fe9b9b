"""Handwritten digits in a loop of your own, on several processes: lockstep.DistributedDataParallel, without a Trainer.

    torchrun --nproc-per-node 2 examples/distributed.py
    python -m torch.distributed.launch --use-env --nproc-per-node 2 examples/distributed.py
    python examples/distributed.py --spawn 2
    python examples/distributed.py                    # one process: the same numbers

Each step takes 64 images for all processes together, cut among them as evenly as it goes; `weight` makes the gradients
those of the whole batch. Trained in float64, so that the printed loss is the same to 12 digits however many there are.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep import DistributedDataParallel

BATCH = 64


def train(epochs: int) -> None:
    """What each process does: the group is there, and says which one this is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    images, labels = (torch.as_tensor(part).to(device) for part in load_digits(return_X_y=True))
    images = images / 16

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double().to(device)
    model = DistributedDataParallel(net, None if device.type == "cpu" else [device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in order.split(BATCH):
            mine = batch.tensor_split(world)[rank]
            optimizer.zero_grad()
            with model.weight(len(mine)):
                outputs = model(images[mine])
            loss = cross_entropy(outputs, labels[mine])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(images):.12f}", flush=True)


def join(rank: int, world: int, port: int, epochs: int) -> None:
    """A process that nobody but this script has started."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(epochs)


def run(epochs: int) -> None:
    """Meet the other processes where the environment says, train, and part."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(epochs)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Read the command line, and find out who started this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--spawn", type=int, default=1, help="processes to start here")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run(arguments.epochs)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if arguments.spawn == 1:
        join(0, 1, port, arguments.epochs)
    else:
        torch.multiprocessing.spawn(join, (arguments.spawn, port, arguments.epochs), arguments.spawn)


if __name__ == "__main__":
    main()
