"""Which devices tests run on: the CPU, or what ``LOCKSTEP_TEST_ACCELERATOR`` names, as ``Trainer(accelerator=...)``."""

from __future__ import annotations

import os

import torch.distributed as dist

from lockstep.ground.accelerators import Accelerator

VARIABLE = "LOCKSTEP_TEST_ACCELERATOR"


def chosen_accelerator() -> str | Accelerator:
    """What tests give to ``Trainer(accelerator=...)`` where the device is all one to them; ``"cuda"``: one card for all
    ranks, since many machines have no second one."""
    name = _chosen()
    if name != "cuda":
        return name
    from lockstep.testing.shared_card import SharedCard

    return SharedCard()


def by_hand_device() -> str:
    """Where a test computes by hand what such a Trainer is held against: on the card, whose bits are its own; other
    devices of tests have the CPU's."""
    return "cuda" if _chosen() == "cuda" else "cpu"


def chosen_backend() -> str:
    """What carries the messages of a test's ranks: gloo; on an accelerator that brings a backend that one, too.

    On one card for all ranks not NCCL, which wants a card for each, but copies on the host.
    """
    name = _chosen()
    if name == "cuda":
        from lockstep.testing import host_group

        host_group.register()
        return host_group.BACKENDS
    own = dist.Backend.default_device_backend_map.get(name, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{name}:{own}"


def _chosen() -> str:
    return os.environ.get(VARIABLE, "cpu")
