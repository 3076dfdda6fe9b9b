"""Steps of several containers over the same model, paired: one of each, in turns, from a common start."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .language import GPT, LARGE, MIDDLE, SMALL, TINY, Corpus, Size, loss_of
from .pairs import turns

Batch = Callable[..., Tensor]
HEAD_START = 0.003
"""Seconds until the common start: the ranks leave a barrier up to a millisecond apart."""


class Tower(nn.Module):
    """A residual MLP of 100 layers: 200 parameter tensors, 6.6 MB."""

    def __init__(self, width: int = 128, layers: int = 100) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        return x


def tower_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    """How far the outputs are from the inputs, turned around."""
    return mse_loss(model(inputs), inputs.flip(0))


def task(name: str) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Batch]:
    """A model with its loss and its batches, by step and rank (this one if not said).

    Args:
        name: "tower", or "tiny", "small", "middle", "large" (GPTs) with a batch size behind a colon: "middle:8".
    """
    own = dist.get_rank()
    torch.manual_seed(0)
    if name == "tower":
        inputs = torch.randn(8, 64, 16, 128, generator=torch.Generator().manual_seed(0))
        return Tower(), tower_loss, lambda step, rank=own: inputs[rank % 8, step % 64]
    size: Size = {"tiny": TINY, "small": SMALL, "middle": MIDDLE, "large": LARGE}[name.split(":")[0]]
    count = int(name.split(":")[1])
    corpus = Corpus(limit=1_000_000)
    return GPT(size), loss_of, lambda step, rank=own: corpus.batch(step, rank, count, size.context + 1)


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """``model`` in a container: "local" (none), "torch", "torch, views", "dp", or ours: "lockstep" and its options."""
    if kind == "local":
        return model
    if kind == "dp":
        from lockstep.extensions.parallel.dp.replicas import DataParallel

        return DataParallel(model, [next(model.parameters()).device] * dist.get_world_size())
    if kind.startswith("torch"):
        return TorchDDP(model, gradient_as_bucket_view="views" in kind, static_graph="static" in kind)
    from lockstep.extensions.parallel.container import DistributedDataParallel

    return DistributedDataParallel(
        model,
        shared_memory="TCP" not in kind,
        static_graph="static" in kind,
        gradient_as_bucket_view="copies" not in kind,
    )


def common_start() -> float:
    """A moment that is the same on all ranks of this machine, just before it comes."""
    dist.barrier()
    told = torch.tensor(time.perf_counter() + HEAD_START, dtype=torch.float64)  # CLOCK_MONOTONIC: the machine's
    dist.broadcast(told, 0)
    start = told.item()
    while time.perf_counter() < start:
        pass
    return start


def elapsed(start: float) -> float:
    """Seconds since a common start, of the rank that needed most; all ranks ask together."""
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def settle(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def race(model: str, kinds: list[str], rounds: int, warmup: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of a step (zero_grad, forward, backward, SGD) of each kind in each round, of the slower rank.

    "dp" is rank 0 alone with all ranks' batches, while the others wait without working.

    Args:
        model: name of a `task`.
        kinds: as `wrapped` names them.
        rounds: each plays every kind once, on the same batch.
        warmup: rounds before, not counted.
        device: where the models are.
    """
    place = torch.device(device)
    origin, loss, batch = task(model)
    origin.to(place)
    runners = {kind: wrapped(kind, copy.deepcopy(origin)) for kind in kinds}
    optimizers = {kind: torch.optim.SGD(found.parameters(), lr=1e-3) for kind, found in runners.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number, order in enumerate(turns(kinds, warmup + rounds)):
        mine = batch(number).to(place)
        whole = torch.cat([batch(number, rank) for rank in range(dist.get_world_size())]).to(place)
        for kind in order:
            data = whole if kind == "dp" else mine
            settle(place)
            start = common_start()
            if kind == "dp" and dist.get_rank():
                seconds[kind].extend([0.0] * (number >= warmup))
                continue
            optimizers[kind].zero_grad()
            loss(runners[kind], data).backward()
            optimizers[kind].step()
            settle(place)
            if number >= warmup:
                seconds[kind].append(time.perf_counter() - start)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return {kind: [max(times) for times in zip(*(found[kind] for found in every), strict=True)] for kind in kinds}
