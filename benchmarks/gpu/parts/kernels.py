"""Pieces by themselves: synchronized BatchNorm, copies of a checkpoint to the host."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.devices import MIB, Clock, settle
from benchmarks.gpu.groups import one_rank_group

LIKE_TORCH = 1.2
"""Goal: our synchronized BatchNorm over torch's."""


def run(part: Part) -> None:
    """Each check on one device, in a group of one rank."""
    with one_rank_group(part.device):
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            part.check(f"SyncBatchNorm forward and backward, {name}", normed, part, dtype)
    part.check("copy of a checkpoint to the host", copied, part)


def timed(part: Part, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, the median of calls in turns behind some that do not count."""
    warm, calls = (1, 2) if part.small else (5, 20)
    clocks = {name: Clock(part.device) for name in runs}
    for number in range(warm + calls):
        for name, call in runs.items():
            if number >= warm:
                clocks[name].tick()
            call()
            if number >= warm:
                clocks[name].tick()
    return {name: round(median(clock.intervals()[::2]), 4) for name, clock in clocks.items()}


class TorchsSynchronized(nn.BatchNorm2d):
    """torch's synchronized BatchNorm, which in a group of one rank would be a plain one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        function: Any = torch.nn.modules._functions.SyncBatchNorm
        own = (self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum)
        found: torch.Tensor = function.apply(input, *own, dist.group.WORLD, 1)
        return found


def ours(channels: int) -> nn.Module:
    """lockstep's, which takes the way of several ranks also with one."""
    from lockstep.engines.ddp.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

    layer = convert_sync_batchnorm(nn.BatchNorm2d(channels))
    assert isinstance(layer, SyncBatchNorm)
    layer.partial = True
    return layer


def normed(part: Part, dtype: torch.dtype) -> Numbers:
    """Ours, torch's, and a BatchNorm that is not synchronized."""
    shape = (4, 3, 5, 5) if part.small else (128, 64, 56, 56)
    x = torch.randn(shape, device=part.device, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, device=part.device, dtype=dtype)

    def step(layer: nn.Module) -> Callable[[], object]:
        def once() -> None:
            x.grad = None
            layer(x).backward(grad)

        return once

    layers: dict[str, nn.Module] = {"plain": nn.BatchNorm2d(shape[1]), "ours": ours(shape[1])}
    if part.is_cuda:
        layers["torch's"] = TorchsSynchronized(shape[1])
    found = timed(part, {name: step(layer.to(part.device)) for name, layer in layers.items()})
    numbers: Numbers = {f"{name}, ms": ms for name, ms in found.items()}
    if part.is_cuda:
        over = numbers["ours, ms"] / numbers["torch's, ms"]
        numbers["ours over torch's"] = round(over, 3)
        expect(part.small or over <= LIKE_TORCH, f"{over:.2f} times torch's", numbers)
    return numbers


def copied(part: Part) -> Numbers:
    """GB a second of the copy that an asynchronous save waits for."""
    from lockstep.checkpoint.io import snapshot

    count, size = (2, 1000) if part.small else (64, 2**22)
    tensors: dict[str, Any] = {str(number): torch.ones(size, device=part.device) for number in range(count)}
    settle(part.device)
    found = timed(part, {"copy": lambda: snapshot(tensors)})
    return {
        "MiB": round(4 * count * size / MIB, 2),
        "ms": found["copy"],
        "GB/s": round(4e-6 * count * size / found["copy"], 2),
    }
