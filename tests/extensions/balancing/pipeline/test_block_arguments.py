"""Blocks of a chain that take more than the output of the block before: masks, tables of positions, memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import BalancedStrategy
from lockstep.testing.equivalence import EquivalenceReport, check_equivalence
from tests.extensions.balancing.balanced import check_reports
from tests.loop.pieces import quiet
from tests.tools.pool import RankFailure, RankPool

WORDS, LENGTH = 7, 6


class Masked(nn.Module):
    """Gives each place the mean of those that a mask shows, turned by a table; and notes what it has seen."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, table: Any = None, memory: Any = None) -> Tensor:
        if mask is None:
            return torch.tanh(self.linear(x))
        assert self.number not in memory, "memory of another micro-batch"
        memory[self.number] = x
        shown = mask.to(x.dtype)
        mean = shown @ x / shown.sum(-1, keepdim=True).clamp(min=1)
        cosine, sine = table
        out: Tensor = torch.tanh(self.linear(mean * cosine + x * sine))
        return out


class Reader(LightningModule):
    """A chain of such blocks: the mask follows from the batch, the table from a buffer."""

    def __init__(self, learned: bool = False, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.learned, self.late = learned, late
        self.words = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList([Masked(number) for number in range(4)])
        self.head = nn.Linear(6, WORDS)
        self.register_buffer("turns", torch.arange(LENGTH, dtype=torch.float64)[:, None] / 3)

    def forward(self, batch: Any) -> Tensor:
        words, there = batch
        mask = there[:, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=there.device).tril()
        x, memory = self.words(words), dict[int, Tensor]()
        turns = self.turns * (self.words.weight.sum() if self.learned else 1)
        table = (turns.cos(), turns.sin())
        for number, block in enumerate(self.blocks):
            x = block(x) if self.late and not number else block(x, mask, table=table, memory=memory)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), batch[0].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch).flatten(0, 1), batch[0].flatten()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def data(batch_size: int) -> DataLoader[Any]:
    by = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (26, LENGTH), generator=by)
    lengths = torch.randint(1, LENGTH + 1, (26, 1), generator=by)
    return DataLoader(TensorDataset(words, torch.arange(LENGTH) < lengths), batch_size)


def equivalence(options: dict[str, Any], devices: int) -> EquivalenceReport:
    return check_equivalence(Reader, data, strategy=BalancedStrategy(**options), devices=devices, batch_size=7)


CASES = [
    (2, {"split": "measured"}),
    (2, {"split": [1, 3], "micro_batches": 3}),
    (2, {"schedule": "interleaved", "split": "equal"}),
    (2, {"schedule": "zero-bubble", "split": "equal"}),
    (4, {"stages": 2, "split": "measured"}),
    (4, {"split": "equal", "schedule": "gpipe"}),
]


@pytest.mark.parametrize(("world", "options"), CASES, ids=str)
def test_a_pipeline_trains_as_one_process(ranks: RankPool, world: int, options: dict[str, Any]) -> None:
    check_reports(ranks(world).run(equivalence, options, world))


def test_in_one_process(ranks: RankPool) -> None:
    options = {"one_process": True, "split": "measured"}
    check_reports(ranks(1).run(equivalence, options, 2))


def seen(strategy: Any, devices: int) -> tuple[float, list[Tensor]]:
    trainer = quiet(strategy=strategy, devices=devices, precision="64-true")
    module = Reader()
    loss = trainer.validate(module, data(7), verbose=False)[0]["val_loss"]
    return loss, trainer.predict(module, data(7))


def test_evaluations_are_those_of_one_process(ranks: RankPool) -> None:
    loss, outputs = seen("auto", 1)
    for found, predicted in ranks(2).run(seen, BalancedStrategy(), 2):
        assert found == pytest.approx(loss, rel=1e-12)
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(predicted, outputs, strict=True))


def fit(learned: bool, late: bool) -> None:
    quiet(strategy="balanced", devices=2, max_steps=1).fit(Reader(learned, late), data(7))


REFUSED = [
    (
        True,
        False,
        r"Block 0 of the chain 'blocks' was called with Tensor, Tensor, table=, memory=, and a tensor other than",
    ),
    (
        False,
        True,
        r"Block 1 of the chain 'blocks' was called with Tensor, Tensor, .* the first block was called with one tensor",
    ),
]


@pytest.mark.parametrize(("learned", "late", "said"), REFUSED)
def test_what_cannot_be_is_refused(ranks: RankPool, learned: bool, late: bool, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        ranks(2).run(fit, learned, late, timeout=40)


# -- hooks on blocks -----------------------------------------------------------------------------------------


class Hooked(LightningModule):
    """Notes what a forward hook of each block sees of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.seen: dict[int, list[Tensor]] = {}
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(self._see, number))

    def _see(self, number: int, layer: nn.Module, given: Any, output: Tensor) -> None:
        self.seen.setdefault(number, []).append(output.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def hooked(world: int) -> dict[int, Tensor]:
    module, rows = Hooked().double(), torch.arange(32, dtype=torch.float64).reshape(8, 4).cos()
    strategy: Any = BalancedStrategy(micro_batches=2, split="equal") if world > 1 else "auto"
    trainer = quiet(max_steps=1, strategy=strategy, devices=world)
    trainer.fit(module, DataLoader(TensorDataset(rows), 8))
    return {number: torch.cat(outputs[-2:] if world > 1 else outputs) for number, outputs in module.seen.items()}


def test_forward_hooks_of_blocks_see_what_the_blocks_compute(ranks: RankPool) -> None:
    """They saw the chain's output behind each block, and on ranks that have other blocks."""
    (whole,) = ranks(1).run(hooked, 1)
    found = ranks(2).run(hooked, 2)
    assert sorted(number for mine in found for number in mine) == [0, 1, 2, 3]
    for mine in found:
        for number, output in mine.items():
            torch.testing.assert_close(output, whole[number], rtol=1e-12, atol=1e-12)
