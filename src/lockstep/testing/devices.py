"""Which devices tests run on: the CPU, or what ``LOCKSTEP_TEST_ACCELERATOR`` names, as ``Trainer(accelerator=...)``."""

from __future__ import annotations

import os

import torch.distributed as dist

VARIABLE = "LOCKSTEP_TEST_ACCELERATOR"


def chosen_accelerator() -> str:
    """What tests give to ``Trainer(accelerator=...)`` where the device is all one to them."""
    return os.environ.get(VARIABLE, "cpu")


def chosen_backend() -> str:
    """What carries the messages of a test's ranks: gloo; on an accelerator that brings a backend that one, too.

    Not NCCL, which wants a card for each rank: gloo carries CUDA tensors by way of the host.
    """
    own = dist.Backend.default_device_backend_map.get(chosen_accelerator(), "gloo")
    return "gloo" if own in ("gloo", "nccl") else f"cpu:gloo,{chosen_accelerator()}:{own}"
