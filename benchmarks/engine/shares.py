"""Fits with equal and with balanced shares, one after the other on the same ranks, of which one is slowed."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import Callback
from lockstep.extensions.balancing.balance.step_times import WindowTimes
from lockstep.extensions.balancing.shares import ShareControl
from lockstep.ground.comm import RowExchange

from .language import GPT, TINY, loss_of

BATCH, BLOCK = 16, 65
"""Samples of a rank with equal shares, and bytes of a sample."""
SETTLED = 40
"""Steps after which a fit is timed."""

OFF: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)

Factor = Callable[[int, int], float]
"""By how much a rank is slower, given its number and the step."""


class Slowed(LightningModule):
    """A small GPT that a slowed rank computes again and again, and throws away but for the last time."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.model, self.twin, self.factor = GPT(TINY), [GPT(TINY)], factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text,) = batch
        left = self.factor(self.global_rank, self.trainer.global_step) - 1
        while left > 0:
            part = text[: max(1, round(min(left, 1.0) * len(text)))]
            torch.autograd.grad(loss_of(self.twin[0], part), [*self.twin[0].parameters()])
            left -= 1
        return loss_of(self.model, text)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Asleep(LightningModule):
    """Its step takes as long as a device of made-up speed needs: 1 ms a sample and 2 ms besides, by sleeping."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.zeros(1)), factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text,) = batch
        time.sleep(self.factor(self.global_rank, self.trainer.global_step) * (2 + len(text)) / 1000)
        return (self.weight * text.float().mean()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


KINDS = {"computes": Slowed, "sleeps": Asleep}


class Times(Callback):
    """When each step began, and this rank's samples of it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.at: list[float] = []
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at.append(self.clock())
        self.samples.append(len(batch[0]))


def fit(kind: str, factor: Factor, balance: bool, steps: int) -> Times:
    """One fit of so many steps on the ranks that there are."""
    times, data = Times(), torch.randint(256, (BATCH * dist.get_world_size() * steps, BLOCK))
    world, flags = dist.get_world_size(), {"accelerator": "cpu", "max_epochs": 1, "callbacks": [times], **OFF}
    trainer = Trainer(strategy="ddp", devices=world, balance=balance, **flags)
    trainer.fit(KINDS[kind](factor), DataLoader(TensorDataset(data), BATCH))
    return times


def begin() -> None:
    """Tell the Trainer that the ranks and their group are there, and nobody what is not measured."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    torch.set_num_threads(1)
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def pairs(kind: str, slow: float, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of a settled step with equal and with balanced shares, by round, and the last shares.

    Args:
        kind: of `KINDS`.
        slow: by how much the last rank is slower; 1.0: not at all.
        steps: of a fit.
        rounds: how often both, the first of them in turns.
    """
    begin()

    def factor(rank: int, step: int) -> float:
        return slow if rank == dist.get_world_size() - 1 else 1.0

    found: dict[str, Any] = {"equal": [], "balanced": [], "shares": []}
    for number in range(rounds):
        for balance in (number % 2 == 0, number % 2 == 1):
            times = fit(kind, factor, balance, steps)
            took = [after - at for at, after in zip(times.at[SETTLED:], times.at[SETTLED + 1 :], strict=False)]
            found["balanced" if balance else "equal"].append(median(took))
            if balance:
                samples: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(samples, times.samples[-1])
                found["shares"].append(samples)
    return found


def moved(kind: str, slow: float, at: int, steps: int) -> dict[str, Any]:
    """The samples of rank 0 by step in a fit whose slowdown moves from the last rank to rank 0."""
    begin()

    def factor(rank: int, step: int) -> float:
        return slow if rank == (dist.get_world_size() - 1 if step < at else 0) else 1.0

    return {"samples": fit(kind, factor, True, steps).samples}


# -- what measuring costs


class Nothing(LightningModule):
    """A step that does next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Listens(Callback):
    """Has steps measured, as `StragglerMonitor` does, and does nothing with it; or as shares need it, without parts."""

    _receives_step_times = True

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.parts:
            trainer.fit_loop.balance._listeners = []


def measured(steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the CPU in a step that is not measured, that is measured for shares, and for `StragglerMonitor`.

    By round, on one rank by itself.
    """
    begin()
    found: dict[str, list[float]] = {"plain": [], "shares": [], "monitor": []}
    for number in range(rounds):
        for name in sorted(found, reverse=number % 2 == 0):
            times = Times(time.thread_time)
            callbacks: list[Callback] = [times] if name == "plain" else [times, Listens(name == "monitor")]
            trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **OFF)
            trainer.fit(Nothing(), DataLoader(TensorDataset(torch.zeros(steps)), 1))
            took = sorted(after - at for at, after in zip(times.at[100:], times.at[101:], strict=False))
            most = took[: len(took) * 9 // 10]  # without what the machine did meanwhile
            found[name].append(sum(most) / len(most))
    return found


def looks(rounds: int) -> dict[str, list[float]]:
    """Seconds of what ranks tell one another in a look, and of the decision: where nothing, and where a little is to
    be gained."""
    begin()
    size = dist.get_world_size()
    control, found = ShareControl(size), []
    for number in range(rounds):
        start = time.perf_counter()
        rows = RowExchange([1.0] * (3 + len(WindowTimes._fields)))
        told = time.perf_counter()
        dist.barrier()
        heard = time.perf_counter()
        rows.read()
        control.look([1.0] * (size - 1) + [1.04 if number % 2 else 1.07], [BATCH] * size)
        found.append(told - start + time.perf_counter() - heard)
    return {"settled": found[1::2], "odd": found[::2]}
