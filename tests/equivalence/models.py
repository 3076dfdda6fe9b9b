"""Modules and data whose gradients must not depend on how a global batch is shared out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.testing import EquivalenceReport, check_equivalence
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def rows(length: int, shuffle: bool = True) -> Callable[[int], Any]:
    """``make_data`` over ``length`` samples: 6 numbers and the number of them that count (1 to 6)."""

    def make(batch_size: int) -> Any:
        source = torch.Generator().manual_seed(7)
        x = torch.randn(length, 6, generator=source)
        count = torch.randint(1, 7, (length,), generator=source)
        return DataLoader(TensorDataset(x, count), batch_size, shuffle=shuffle)

    return make


def cut_by_mesh(layer: nn.Module, mesh: Any, plan: dict[str, Any]) -> None:
    """Cut a layer by a plan over the tensor-parallel ranks of a 2-D mesh, and the rest over the others."""
    row, rows = mesh["tensor_parallel"], mesh["data_parallel"]
    if row.size() > 1:
        parallelize_module(layer, row, plan)
    if rows.size() > 1:
        fully_shard(layer, mesh=rows)


class Plain(LightningModule):
    """A small MLP under SGD with momentum and a schedule by steps; the loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))

    def losses(self, x: Tensor) -> Tensor:
        return (self.net(x).squeeze(1) - 3 * x[:, 0]).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.losses(batch[0]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Weighted(Plain):
    """Its loss is a mean over the numbers that count, of which a rank's samples have more or fewer."""

    def weight(self, count: Tensor) -> Tensor:
        return count.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, count = batch
        counts = torch.arange(6, device=count.device) < count[:, None]
        distance = (self.net(x) - x).square()
        return {"loss": distance[counts].mean(), "weight": self.weight(count)}


class Sometimes(Plain):
    """A layer of it is used by some samples only: by no rank, by some or by all of them in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(6, 1)

    def chosen(self, x: Tensor) -> Tensor:
        return x[:, 1] > 0.95

    def losses(self, x: Tensor) -> Tensor:
        chosen = self.chosen(x)
        losses = super().losses(x)
        return losses + chosen * self.rare(x).squeeze(1).square() if chosen.any() else losses


class Running(Plain):
    """The loss uses running statistics, as those of a BatchNorm that is frozen, of the batch's first sample.

    Rank 0 has the global batch's first sample, so with its buffer all ranks do what one process does.
    """

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(6))

    def losses(self, x: Tensor) -> Tensor:
        losses = super().losses(x - self.running)
        self.running.lerp_(x[0].detach(), 0.5)
        return losses


class Idle(Plain):
    """A layer of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(6, 4)


class Normed(Plain):
    """Its statistics are taken over the batch, so that ranks must take them together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Block(nn.Module):
    """A norm, and up and down in width; sizes that no world but one, two and four divides, or none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Blocks(Plain):
    """Repeated blocks and a 0-d parameter, which any strategy can hold in shards, or split over two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), Block(7), Block(7), nn.Linear(7, 1))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or isinstance(self.net[1].up.weight, DTensor):
            return
        for block in self.net[1:3]:
            cut_by_mesh(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def losses(self, x: Tensor) -> Tensor:
        return super().losses(x * self.scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)  # small enough not to magnify rounding


Case = tuple[type[LightningModule], int, dict[str, Any]]
"""A module, the number of samples, and arguments of `check_equivalence`."""
# With micro-batches of 4, 72 samples divide for every world, and 23 leave an uneven tail. With micro-batches of 2, one
# of 25 samples is left for all ranks: the others have none.
CASES: dict[str, Case] = {
    "even": (Plain, 72, {}),
    "uneven last batch": (Plain, 23, {}),
    "empty shares": (Plain, 25, {"batch_size": 2, "steps": 7}),
    "accumulation 3, clipped": (Plain, 23, {"accumulate": 3, "gradient_clip_val": 0.5}),
    "own weights": (Weighted, 23, {"accumulate": 3}),
    "unused in some steps": (Sometimes, 23, {"batch_size": 2}),
    "never used": (Idle, 23, {"accumulate": 3}),
}


def report(
    make: Callable[[], Any], data: Callable[[int], Any], strategy: Any, given: dict[str, Any]
) -> EquivalenceReport:
    """Compare the ranks that call this with one process; ``strategy`` makes the strategy, or is its name."""
    made = strategy() if callable(strategy) else strategy
    return check_equivalence(make, data, strategy=made, devices=dist.get_world_size(), **given)


def agree(pool: RankPool, make: Callable[[], Any], data: Callable[[int], Any], strategy: Any, **given: Any) -> None:
    """Assert that the ranks of a pool train what one process trains with the whole batch."""
    for found in pool.run(report, make, data, strategy, given, timeout=60):
        assert found, found


def agree_in(pool: RankPool, case: Case, strategy: Any) -> None:
    """Assert the same for a case."""
    make, length, given = case
    agree(pool, make, rows(length), strategy, **given)


def same(one: Any, other: Any) -> bool:
    """Return True if two nests of dicts, lists and tensors are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def refusal(make: Any, strategy: Any, batch: Any, **flags: Any) -> str:
    """Return the words with which a fit on the ranks that call this is refused."""
    with pytest.raises((MisconfigurationException, NotImplementedError)) as raised:  # noqa: PT012  # also by the strategy
        made = strategy() if callable(strategy) else strategy
        quiet(strategy=made, devices=dist.get_world_size(), max_steps=3, **flags).fit(make(), batch)
    return str(raised.value)
