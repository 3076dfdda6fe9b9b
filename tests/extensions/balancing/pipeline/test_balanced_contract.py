"""What a user of a pipeline may rely on beside its numbers: weights of parts, saves, averages, recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import BalancedStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

TOKENS, WORDS, PADDED = 5, 7, -100


class Tagger(LightningModule):
    """A class for each token that is none of padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        words, classes = batch
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits, counted = self.head(x).flatten(0, 1), (classes != PADDED).sum()
        if not counted:
            return {"loss": 0.0 * logits.sum(), "weight": counted}
        return {"loss": cross_entropy(logits, classes.flatten(), ignore_index=PADDED), "weight": counted}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def padded(samples: int = 13) -> DataLoader[Any]:
    by = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (samples, TOKENS), generator=by)
    classes = torch.randint(3, (samples, TOKENS), generator=by)
    lengths = torch.randint(TOKENS + 1, (samples, 1), generator=by)
    lengths[:4] = torch.tensor([[0], [0], [3], [5]])  # the first part of the first batch is padding alone
    classes[torch.arange(TOKENS) >= lengths] = PADDED
    return DataLoader(TensorDataset(words, classes), 8)


def trained(options: dict[str, Any] | None, callbacks: list[Callback] | None = None) -> dict[str, Tensor]:
    """Weights after a fit on this rank, in float64."""
    module = Tagger()
    where: dict[str, Any] = {} if options is None else {"strategy": BalancedStrategy(**options), "devices": 2}
    quiet(precision="64-true", max_epochs=2, callbacks=callbacks, **where).fit(module, padded())
    return copy.deepcopy(module.state_dict())


def check_same(found: dict[str, Tensor]) -> None:
    expected = trained(None)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("recomputes", [None, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_loss_that_is_a_mean_over_tokens_has_their_number_as_weight(
    ranks: RankPool, schedule: str, recomputes: bool | None
) -> None:
    options = {"micro_batches": 4, "schedule": schedule, "split": "equal", "activation_checkpointing": recomputes}
    check_same(ranks(2).run(trained, options)[0])


def test_the_same_in_one_process(ranks: RankPool) -> None:
    check_same(ranks(1).run(trained, {"micro_batches": 4, "one_process": True, "split": "equal"})[0])


class Order(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append(f"end {batch_idx}")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.told.append("save")


def saved_in_windows(folder: str) -> list[str]:
    order = Order()
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    strategy = BalancedStrategy(split="equal", micro_batches=2)
    flags: dict[str, Any] = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = quiet(strategy=strategy, devices=2, max_epochs=1, callbacks=[order, saving], **flags)
    trainer.fit(Tagger(), padded(26))
    return order.told


def test_a_save_at_the_end_of_a_window_comes_behind_all_of_its_batches(ranks: RankPool, tmp_path: Any) -> None:
    """It came behind the first one: a run that was killed then never called `on_train_batch_end` for the others."""
    told = ranks(2).run(saved_in_windows, str(tmp_path))[0]
    assert told == ["end 0", "end 1", "save", "end 2", "end 3", "save"]
