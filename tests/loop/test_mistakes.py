"""Mistakes that show within the first step: each ends in a sentence with the name, the cause and the way out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from lockstep.strategies import DDPStrategy, FSDPStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, acting, numbers, quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(240)
LONGEST = 520
"""Characters of a sentence that can be read at a glance."""


class Good(LightningModule):
    """Trains, unless a part is replaced."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=self.sparse), nn.Linear(4, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.words(batch)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Sparse(Good):
    sparse = True


class MetaLeft(Good):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.head = nn.Linear(4, 1)


class OwnBackward(Good):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        return loss


class HoldsOn(Good):
    before: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.before
        self.before = loss
        return loss


def replaced(name: str, **methods: Any) -> type[Good]:
    return type(name, (Good,), methods)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


REPLACED = [
    replaced("Replaced", on_train_start=lambda self: setattr(self, "words", nn.Embedding(20, 4))),
    replaced("Others", configure_optimizers=lambda self: sgd(Good().parameters())),
    replaced("AllFrozen", on_train_start=lambda self: self.requires_grad_(False)),
    replaced("NoOptimizer", configure_optimizers=lambda self: "SGD"),
    replaced("NoScheduler", configure_optimizers=lambda s: {"optimizer": sgd(s.parameters()), "lr_scheduler": "step"}),
]


ENGINES: dict[str, tuple[Callable[[], Any], int]] = {
    "auto": (lambda: "auto", 1),
    "ddp": (DDPStrategy, 2),
    "ddp, sharded optimizer": (lambda: DDPStrategy(shard_optimizer=True), 2),
    "fsdp": (FSDPStrategy, 2),
}
MISTAKES: list[type[Good]] = [
    *(Sparse, MetaLeft, OwnBackward, HoldsOn, *REPLACED),
]
WORDS_OF_TORCH = ("assign a", "Could not run", "Function ", "vars()")


def ends(kind: type[Good], engine: str) -> str | None:
    """What a fit ends with; None: it trains."""
    make, world = ENGINES[engine]
    try:
        torch.manual_seed(0)
        trainer = quiet(strategy=make(), devices=world, max_epochs=1)
        trainer.fit(kind(), DataLoader(torch.randint(0, 10, (16, 3)), 4 // world))  # type: ignore[arg-type]
    except Exception as error:
        return str(error)
    return None


def check(ranks: RankPool, kind: type[Good], engine: str) -> None:
    world = ENGINES[engine][1]
    for said in ranks(world).run(ends, kind, engine, timeout=60, group=world > 1):
        if said is None:  # an engine may be able to
            continue
        assert len(said) <= LONGEST, said
        assert not said.startswith(WORDS_OF_TORCH), said
        assert any(word in said for word in (kind.__name__, "Trainer(", "Strategy(", "`")), said


EVERY_DAY = [(Sparse, "fsdp"), (OwnBackward, "auto")]


@pytest.mark.parametrize(("kind", "engine"), EVERY_DAY)
def test_a_mistake_is_told_in_a_sentence(ranks: RankPool, kind: type[Good], engine: str) -> None:
    """They ended in torch's words: of gradients that do not fit, or 6,353 characters about a backend."""
    (said, *_) = ranks(ENGINES[engine][1]).run(ends, kind, engine, timeout=60, group=ENGINES[engine][1] > 1)
    assert said is not None
    assert kind is not Sparse or "FSDPStrategy() does not support the sparse gradients of words.weight" in said
    assert kind is Sparse or kind.__name__ in said
    check(ranks, kind, engine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MISTAKES)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_mistake_under_each_engine(ranks: RankPool, kind: type[Good], engine: str) -> None:
    check(ranks, kind, engine)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_an_error_of_torch_outside_of_hooks_names_the_place() -> None:
    class Overwrites(Good):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wave = self.words(batch).exp()
            loss = self.head(wave).sum()
            return loss if not batch_idx else loss + (wave.add_(1) * 0).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        quiet(max_epochs=1).fit(Overwrites(), DataLoader(torch.randint(0, 10, (16, 3)), 4))  # type: ignore[arg-type]
    assert raised.value.__notes__ == ["In trainer.fit on rank 0, epoch 0, batch 1; the last hook was training_step."]


# -- What a user asks for that cannot all be: it is refused, or said ---------------------------------------------


class Measured(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0)


def fit(**flags: Any) -> None:
    quiet(**{"max_epochs": 2, **flags}).fit(Measured(), numbers(2), numbers(1))


def test_two_progress_bars_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"2 progress bars"):
        quiet(enable_progress_bar=True, callbacks=[TQDMProgressBar(), TQDMProgressBar()])


SAID: list[tuple[str, dict[str, Any], str]] = [
    ("flags", {"overfit_batches": 1, "limit_train_batches": 2}, r"overfit_batches=1, limit_train_batches=2"),
    ("checkpoint", {"every_n_epochs": 5}, r"every_n_epochs=5\) saves nothing with"),
    ("checkpoint", {"every_n_epochs": 0}, r"every_n_epochs=0\) saves nothing"),
    ("checkpoint", {"save_top_k": 0}, r"save_top_k=0\) saves nothing"),
]


@pytest.mark.parametrize(("of", "given", "said"), SAID)
def test_what_has_no_effect_is_said(of: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, **given) if of == "checkpoint" else None
    flags = given if checkpoint is None else {"callbacks": [checkpoint], "enable_checkpointing": True}
    with pytest.warns(UserWarning, match=said):
        fit(**flags)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logger": True}, r"'x', ..., logger=True\), but the Trainer has no logger"),
        ({"sync_dist_group": object()}, r"sync_dist_group=...\) has no effect"),
        ({"enable_graph": True}, r"enable_graph=...\) has no effect"),
    ],
)
def test_and_arguments_of_log(options: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        quiet(max_epochs=1).fit(acting(training_step=lambda m, *_: m.log("x", 1.0, **options)), numbers(1))


def test_what_goes_together_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    savers = [ModelCheckpoint(tmp_path, monitor="v", **by) for by in ({}, {"every_n_train_steps": 2})]
    callbacks = [EarlyStopping("v"), *savers, Timer()]
    fit(callbacks=callbacks, enable_checkpointing=True, gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert [str(each.message) for each in recwarn if "eval mode" not in str(each.message)] == []


# -- what steps take and return


class Manual(Slope):
    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.automatic_optimization, self.returned = False, returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [5, 1.5, "loss", [torch.zeros(())], True])
def test_manual_optimization_returns_a_tensor_a_dict_or_nothing(returned: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"`training_step` returned .*manual optimization"):
        quiet(max_epochs=1).fit(Manual(returned), numbers(1))
