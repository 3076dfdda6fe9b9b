"""Random numbers in a pipeline: blocks of different ranks draw different ones, the step's code those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import BalancedStrategy
from tests.loop.pieces import SaveAt, quiet
from tests.tools.pool import RankPool


class Masks(nn.Module):
    """Notes what its dropout has left."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor = self.dropout(torch.ones_like(x))
        self.seen.append(mask.detach() > 0)
        out: Tensor = x + self.linear(x * mask)
        return out


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.seen: list[Tensor] = []
        self.before: list[float] = []
        self.drawn: list[float] = []
        self.layers = nn.Sequential(*[Masks(self.seen) for _ in range(4)])
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = torch.rand(())  # before the chain, on the first stage, and behind it, on the last
        self.before.append(scale.item())
        out = self.head(self.layers(batch[0] * (1 + scale)))
        self.drawn.append(scale.item())
        return (out - scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24 * 16.0).reshape(24, 16).sin()), 8)


def fitted(folder: str, resume: bool = False) -> tuple[list[Tensor], tuple[list[float], ...], dict[str, Tensor]]:
    torch.manual_seed(5)
    strategy = BalancedStrategy(micro_batches=2, split="equal")
    module, path = Net(), f"{folder}/at.ckpt"
    trainer = quiet(max_epochs=2, devices=dist.get_world_size(), strategy=strategy, callbacks=[SaveAt(1, path)])
    trainer.fit(module, rows(), ckpt_path=path if resume else None)
    return module.seen, (module.before, module.drawn), dict(module.state_dict())


def test_masks_of_different_ranks_are_different(ranks: RankPool, tmp_path: Path) -> None:
    """All stages drew the same numbers: the third block's mask was the first one's, in each step."""
    one, other = (seen for seen, _, _ in ranks(2).run(fitted, str(tmp_path)))
    same = [bool(torch.equal(mine, its)) for mine in one for its in other if mine.shape == its.shape]
    assert len(one) == len(other) > 20
    assert not any(same)
    for seen in (one, other):  # nor does a rank draw one twice
        assert not any(torch.equal(seen[i], seen[j]) for i in range(2, len(seen)) for j in range(i))


def test_what_the_step_draws_is_alike_where_it_runs_twice(ranks: RankPool, tmp_path: Path) -> None:
    """The first stage scales what goes in, and the last one tells by how much: both by one number."""
    found = [numbers for _, numbers, _ in ranks(2).run(fitted, str(tmp_path))]
    Net()  # which seeds
    expected = [torch.rand(()).item() for _ in range(12)]
    for before, behind in found:
        assert before[-12:] == expected  # the first call of a shape is tried out before
        assert behind in ([], expected)
    assert any(behind for _, behind in found)


def test_a_resume_draws_what_the_run_would_have_drawn(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks(2).run(fitted, str(tmp_path))
    resumed = ranks(2).run(fitted, str(tmp_path), True)
    for (_, _, weights), (_, _, again) in zip(whole, resumed, strict=True):
        assert all(torch.equal(again[name], value) for name, value in weights.items())
