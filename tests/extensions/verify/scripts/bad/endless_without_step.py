"""Waits for a file that never comes before it trains."""

import os
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    while not os.path.exists("there-is-no-such-file"):
        time.sleep(0.2)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
