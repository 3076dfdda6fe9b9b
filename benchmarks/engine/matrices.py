"""A step of Muon over shards beside the same step on one process: matrices of one size, ranks that own them."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon

from lockstep.engines.sharded import whole_updates
from lockstep.engines.sharded.whole_updates import WholeUpdates

from .race import common_start


class _TimedExchange(whole_updates._Exchange):
    """Notes the processor time that a rank's main thread gives to messages: packing, and taking apart."""

    seconds = 0.0

    def __init__(self, *args: Any) -> None:
        start = time.thread_time()
        super().__init__(*args)
        _TimedExchange.seconds += time.thread_time() - start

    def arrive(self) -> list[list[Tensor]]:
        """As it is."""
        start = time.thread_time()
        found = super().arrive()
        _TimedExchange.seconds += time.thread_time() - start
        return found


def _matrices(size: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(count)])


def _alone(size: int, count: int) -> tuple[Muon, list[Tensor]]:
    """The optimizer on one process, and its parameters with gradients."""
    parameters = list(_matrices(size, count).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(size, size)
    return Muon(parameters), parameters


def _in_shards(size: int, count: int, gradients: list[Tensor]) -> Muon:
    """The same, of parameters and gradients that are shards."""
    module = _matrices(size, count)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Muon(module.parameters())
    WholeUpdates([optimizer])
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        shard: Any = torch.distributed.tensor.distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = shard
    return optimizer


def steps(size: int, count: int, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each round: of the step on one process, "alone", and over shards, "step", of the rank that is slowest.

    Each by the clock, and as processor time of the thread that computes ("alone, computing", "step, computing"), which
    other processes of the machine do not change: without what it waits for, and for the step over shards without
    what it does for messages.

    Args:
        size: rows and columns of a matrix.
        count: of matrices.
        rounds, warmup: of steps of each kind, and of such before.
    """
    alone, parameters = _alone(size, count)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for gradient in gradients:
        dist.broadcast(gradient, 0)
    sharded = _in_shards(size, count, gradients)
    whole_updates._Exchange = _TimedExchange  # type: ignore[misc]
    measured: dict[str, list[float]] = {}
    for number in range(warmup + rounds):
        dist.barrier()
        mine = _timed(alone, "alone") if dist.get_rank() == 0 else {}
        common_start()
        mine |= _timed(sharded, "step")
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        for name in every[0] if number >= warmup else ():
            measured.setdefault(name, []).append(max(each.get(name, 0.0) for each in every))
    return measured


def _timed(optimizer: Muon, name: str) -> dict[str, float]:
    _TimedExchange.seconds = 0.0
    start, computed = time.perf_counter(), time.thread_time()
    optimizer.step()
    computed, seconds = time.thread_time() - computed, time.perf_counter() - start
    return {name: seconds, f"{name}, computing": computed - _TimedExchange.seconds}
