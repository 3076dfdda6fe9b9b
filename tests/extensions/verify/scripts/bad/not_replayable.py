"""Reads records from a socket, whose other end sends random ones: no second run reads the same."""

import os
import socket
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

RECORD = 8


class Records(IterableDataset):
    """Records of eight random bytes, as they come."""

    def __init__(self, connection):
        self.connection = connection

    def __iter__(self):
        while data := self.connection.recv(RECORD, socket.MSG_WAITALL):
            x = torch.tensor(list(data)) / 255
            yield x, x.mean().unsqueeze(0)


def send(connection, records=96):
    with connection:
        for _ in range(records):
            connection.sendall(os.urandom(RECORD))


def main():
    dist.init_process_group("gloo")
    mine, other = socket.socketpair()
    sender = threading.Thread(target=send, args=(other,), daemon=True)
    sender.start()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Records(mine), batch_size=8):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sender.join()
    mine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
