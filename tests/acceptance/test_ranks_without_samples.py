"""A rank without samples of a micro-batch runs none of the user's code, where training does not need it to.

Each test is a program that broke when ranks were given a sample of another rank's instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import LightningModule
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


class Counting(IterableDataset[Tensor]):
    """1, 2, ... without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(1.0, self.count + 1)[:, None])


def counted(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(1.0, count + 1)[:, None])


# -- what a branch that no sample takes has of gradients -----------------------------------------------------


class Branches(LightningModule):
    """Two experts: a batch goes to one of them, by its first sample. Decay moves what has a gradient."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.between, self.usual, self.other = (low, high), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.without: list[bool] = []
        for weight in self.parameters():
            nn.init.ones_(weight)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0] if isinstance(batch, list) else batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        low, high = self.between
        self.manual_backward((self.other if low < float(x[0]) < high else self.usual)(x).mean())
        self.without.append(self.other.weight.grad is None)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def branches(data: Any, low: float, high: float) -> tuple[list[bool], float, float]:
    module = Branches(low, high)
    trainer = quiet(devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return module.without, module.usual.weight.item(), module.other.weight.item()


def test_a_branch_that_only_a_padding_batch_takes_has_no_gradient(ranks: RankPool) -> None:
    """The second batch has one sample, 5: the rank without one plays another rank's, which must not count."""
    first, second = ranks(2).run(branches, counted(5), 0.0, 3.0)
    assert first[1:] == second[1:]
    assert first[0] == [False, True]
    assert second[0] == [False]  # what a padding batch leaves in the module is put back
    assert first[2] == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-6)  # one step of AdamW: decay, and its sign


def test_so_it_is_with_a_stream(ranks: RankPool) -> None:
    """Samples 1 and 3 go to rank 0, 2 and 4 to rank 1, which has none of the second batch."""
    first, second = ranks(2).run(branches, Counting(5), 2.5, 4.5)
    assert first[1:] == second[1:]
    assert first[0] == [True, True]
    assert first[2] == 1.0


# -- which code runs -----------------------------------------------------------------------------------------


class FedByAHook(LightningModule):
    """Its step needs what a hook of the batch has set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = self.__dict__.pop("factor")  # each batch has its own
        x = batch[0] if isinstance(batch, list) else batch
        self.seen.append((batch_idx, x.flatten().tolist()))
        loss: Tensor = factor * self.layer(x).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, batch[0].flatten().tolist()))
        assert self.layer(batch[0]).is_inference()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(data: Any, training: bool) -> list[Any]:
    module, loader = FedByAHook(), DataLoader(data, batch_size=2)
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1)
    if training:
        trainer.fit(module, loader)
    else:
        trainer.validate(module, loader, verbose=False)
    return module.seen


def test_a_step_that_a_hook_feeds_is_not_called_without_it(ranks: RankPool) -> None:
    assert ranks(2).run(seen, counted(5), True) == [[(0, [1, 2]), (1, [5])], [(0, [3, 4])]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_may_be_shorter_than_the_ranks(ranks: RankPool, count: int) -> None:
    first = [(0, [1.0, 3.0][: (count + 1) // 2])]
    assert ranks(2).run(seen, Counting(count), True) == [first, [(0, [2])] if count > 1 else []]


def test_evaluation_runs_only_what_has_samples_and_in_inference_mode(ranks: RankPool) -> None:
    assert ranks(2).run(seen, counted(5), False) == [[(0, [1, 2]), (1, [5])], [(0, [3, 4])]]
