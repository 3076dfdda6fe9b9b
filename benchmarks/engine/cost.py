"""CPU time that the reducer adds to a backward, for each parameter tensor: one process, nothing is sent.

The group is torch's "fake" one of two ranks, and the transport carries nothing, so that what is left is the
reducer: arming (with a default ``zero_grad()`` before it, so every gradient's place is laid out anew), what
happens at each gradient, and tidying up. A plain backward that finds no gradients keeps the tensors that it made;
with views it adds them to what is there, in C++. That addition is told apart from Python's part by a plain backward
for which places were laid out while the clock stood.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel.container import DistributedDataParallel

from .pairs import Interval, interval, turns

TENSORS = 200
PLAIN, ADDED = "plain", "plain, added to places laid out before"
REDUCER, STATIC = "reducer", "reducer, static_graph"
WHOLE, WHOLE_STATIC = "container", "container, static_graph"
KINDS = [PLAIN, ADDED, REDUCER, STATIC, WHOLE, WHOLE_STATIC]


class Nowhere(AllReduce):
    """A transport that carries nothing: the mean is taken to be what this rank has."""

    def start(self, bucket: Bucket, scale: float) -> None:
        """Nobody is told."""

    def flush(self) -> None:
        """A message begins when its bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        """It is there."""


class Sum(nn.Module):
    """The sum of 200 small vectors, by one operation: hardly any work beside that of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(TENSORS))

    def forward(self) -> Tensor:
        return torch.cat(list(self.vectors)).sum()


def make_step(kind: str, model: nn.Module) -> Callable[[], tuple[float, float]]:
    """A step that gives its CPU seconds: those of zero_grad and backward, and those with the forward."""
    runner = model
    reducer: Reducer | None = None
    if kind in (REDUCER, STATIC):
        named = list(model.named_parameters())
        reducer = Reducer(named, static_graph=kind == STATIC, transport=Nowhere(None))
    elif kind in (WHOLE, WHOLE_STATIC):
        runner = DistributedDataParallel(model, shared_memory=False, static_graph=kind == WHOLE_STATIC)
    places = [(parameter, torch.zeros_like(parameter)) for parameter in model.parameters()] if kind == ADDED else []

    def step() -> tuple[float, float]:
        begin = time.thread_time()
        loss = runner()
        start = time.thread_time()
        runner.zero_grad()
        stopped = time.thread_time()
        for parameter, place in places:
            parameter.grad = place
        if places:
            stopped = time.thread_time() - stopped
            begin, start = begin + stopped, start + stopped
        if reducer is not None:
            reducer.prepare()
            loss.backward()
            reducer.finish()
        else:
            loss.backward()
        end = time.thread_time()
        return end - start, end - begin

    return step


def cost(rounds: int, warmup: int = 10) -> dict[str, list[list[float]]]:
    """Of each kind, (seconds of zero_grad and backward, seconds with the forward) in each round."""
    steps = {kind: make_step(kind, Sum()) for kind in KINDS}
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    gc.disable()  # what it clears away is not told apart
    for number, order in enumerate(turns(KINDS, warmup + rounds)):
        if number % 50 == 0:
            gc.collect()
        for kind in order:
            steps[kind]()  # as in a loop of its own: what the others left in the caches is not its cost
            seconds = steps[kind]()
            if number >= warmup:
                found[kind].append(list(seconds))
    gc.enable()
    return found


def a_tensor(found: dict[str, list[list[float]]], kind: str, base: str, forward: bool) -> tuple[Interval, float]:
    """Microseconds a tensor of ``kind`` over ``base``: interval of the paired differences, and of the minima.

    Args:
        found: what `cost` found.
        kind, base: two kinds.
        forward: whether the forward is counted.
    """
    ours = [seconds[forward] for seconds in found[kind]]
    theirs = [seconds[forward] for seconds in found[base]]
    scale = 1e6 / TENSORS
    return interval([(a - b) * scale for a, b in zip(ours, theirs, strict=True)]), (min(ours) - min(theirs)) * scale


def fake_ranks() -> None:
    """Join torch's fake group of two ranks: its collectives return at once and change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def measure(rounds: int) -> dict[str, list[list[float]]]:
    """`cost` in a process of its own."""
    torch.set_num_threads(1)
    fake_ranks()
    try:
        return cost(rounds)
    finally:
        dist.destroy_process_group()
