"""Fits of a pipeline split equally and by measured seconds, one after the other on the same ranks, one of them slow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.extensions.balancing.pipeline.control import BlockCost, SplitControl, StageCost, StageLook
from lockstep.extensions.balancing.pipeline.measured_split import LATEST, MEASURED
from lockstep.extensions.balancing.pipeline.times import AFTER, BACKWARD, BEFORE, BLOCKS, StageTimes, typical
from lockstep.ground.comm import RowExchange
from lockstep.strategies import BalancedStrategy

from .language import BYTES, Block, Size
from .shares import OFF, Factor, Times, begin

BATCH, MICRO_BATCHES = 16, 8
"""Samples of a batch, and its parts."""
BLOCKS_OF_CHAIN, SIZE = 12, Size(64, 12)
MILLISECONDS = 1.5
"""Of a forward of a sleeping block; its backward takes twice as long."""
BLOCKS_OF_RANK = 4
"""Of the chain on which schedules race."""
SETTLED = 20
"""Steps after which a fit is timed."""


class Slowed(nn.Module):
    """A block of a GPT that a slowed rank computes again and again."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.block, self.twin, self.factor = Block(SIZE), [Block(SIZE)], factor

    def forward(self, x: Tensor) -> Tensor:
        left = self.factor() - 1 if torch.is_grad_enabled() else 0.0
        while left > 0:
            part = x.detach()[: max(1, round(min(left, 1.0) * len(x)))].requires_grad_()
            torch.autograd.grad(self.twin[0](part).sum(), [part, *self.twin[0].parameters()])
            left -= 1
        out: Tensor = self.block(x)
        return out


class Asleep(nn.Module):
    """A block that takes as long as a device of made-up speed needs, by sleeping."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(())), factor

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        time.sleep(self.factor() * MILLISECONDS / 1000)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(self.factor() * 2 * MILLISECONDS / 1000))
        return out


KINDS = {"computes": Slowed, "sleeps": Asleep}


class Deep(LightningModule):
    """A small language model, whose blocks are of one of the `KINDS`."""

    def __init__(self, kind: str, factor: Factor) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, SIZE.width)
        self.layers = nn.Sequential(
            *(KINDS[kind](lambda: factor(self.global_rank, self.global_step)) for _ in range(BLOCKS_OF_CHAIN))
        )
        self.head = nn.Linear(SIZE.width, BYTES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text,) = batch
        logits = self.head(self.layers(self.bytes(text[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(kind: str, factor: Factor, split: str, steps: int) -> tuple[Times, BalancedStrategy]:
    """One fit of so many steps on the ranks that there are."""
    drawn = torch.Generator().manual_seed(1)  # the stages of one model must see the same samples
    times, data = Times(), torch.randint(BYTES, (BATCH * steps, SIZE.context + 1), generator=drawn)
    strategy = BalancedStrategy(split=split, micro_batches=MICRO_BATCHES)
    flags = {"accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": 1, "callbacks": [times], **OFF}
    Trainer(strategy=strategy, **flags).fit(Deep(kind, factor), DataLoader(TensorDataset(data), BATCH))
    return times, strategy


def bottleneck(split: Sequence[int], factors: Sequence[float]) -> float:
    """Blocks' times that the slowest stage takes; stages are on the ranks in reverse."""
    return max(count * factor for count, factor in zip(split, reversed(factors), strict=True))


def best(factors: Sequence[float]) -> float:
    """The least bottleneck of all splits."""
    cuts = itertools.combinations(range(1, BLOCKS_OF_CHAIN), len(factors) - 1)
    ends = ((0, *cut, BLOCKS_OF_CHAIN) for cut in cuts)
    return min(bottleneck([b - a for a, b in itertools.pairwise(each)], factors) for each in ends)


def pairs(kind: str, slow: float, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of a settled step by round, the last splits, and their bottlenecks by the best one's.

    Args:
        kind: of `KINDS`.
        slow: by how much the last rank is slower; 1.0: not at all.
        steps: of a fit.
        rounds: how often both, the first of them in turns.
    """
    begin()
    world = dist.get_world_size()
    factors = [slow if rank == world - 1 else 1.0 for rank in range(world)]
    found: dict[str, Any] = {"equal": [], "measured": [], "splits": [], "over the best": []}
    for number in range(rounds):
        for split in ("equal", "measured")[:: 1 if number % 2 else -1]:
            times, strategy = fit(kind, lambda rank, step: factors[rank], split, steps)
            took = [after - at for at, after in zip(times.at[SETTLED:], times.at[SETTLED + 1 :], strict=False)]
            found[split].append(median(took))
            if split == "measured":
                last = strategy.decisions[-1].after
                found["splits"].append(list(last))
                found["over the best"].append(bottleneck(last, factors) / best(factors))
    return found


def moved(kind: str, slow: float, at: int, steps: int) -> dict[str, Any]:
    """What was decided, by step, in a fit whose slowdown moves from the last rank to rank 0."""
    begin()
    world = dist.get_world_size()
    _, strategy = fit(
        kind, lambda rank, step: slow if rank == (world - 1 if step < at else 0) else 1.0, "measured", steps
    )
    return {"decisions": [[found.step, list(found.before), list(found.after)] for found in strategy.decisions]}


class _Sleeps(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(MILLISECONDS / 1000)
        return gradient


class Thirds(nn.Module):
    """A block whose forward, gradient of the input and gradient of the weight take equally long, by sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(MILLISECONDS / 1000)
        out: Tensor = _Sleeps.apply(x) + _Sleeps.apply(self.weight)
        return out


class Scheduled(LightningModule):
    """Four such blocks for each rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Thirds() for _ in range(BLOCKS_OF_RANK * ranks)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def schedules(names: Sequence[str], micro_batches: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by schedule, a median for each round, and without any waiting for other ranks."""
    begin()
    world = dist.get_world_size()
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: 1 if number % 2 else -1]:
            times, data = Times(), TensorDataset(torch.randn(BATCH * steps, 1))
            strategy = BalancedStrategy(split="equal", schedule=name, micro_batches=micro_batches)
            flags = {"accelerator": "cpu", "devices": world, "max_epochs": 1, "callbacks": [times], **OFF}
            Trainer(strategy=strategy, **flags).fit(Scheduled(world), DataLoader(data, BATCH))
            took = [after - at for at, after in itertools.pairwise(times.at[2:])]
            found[name].append(median(took))
    return found


def measuring(rounds: int) -> dict[str, float]:
    """Seconds of the CPU that measuring takes a step: of the windows, and of a look, shared out over its windows."""
    begin()
    size, control = dist.get_world_size(), SplitControl([BlockCost(1 / 8)] * 8, [StageCost(1.0)] * 2, (4, 4))
    times = StageTimes(torch.device("cpu"))
    parts = [times.wrapped(part, lambda: None) for part in (BEFORE, BLOCKS, AFTER, BACKWARD)]
    windows, looks = [], []
    for number in range(rounds):
        start = time.thread_time()
        for _ in range(MEASURED):
            with times.window(4):
                for _ in range(4):
                    for part in parts:
                        part()
        measured = time.thread_time()
        rows = RowExchange(typical(times.take()))
        told = time.thread_time()
        dist.barrier()
        heard = time.thread_time()
        rows.read()
        control.look([StageLook(1.0 + number % 3 / 100)] * size, 4)
        looks.append(told - measured + time.thread_time() - heard)
        windows.append(measured - start)
    return {"windows": median(windows) / LATEST, "looks": median(looks) / LATEST}
