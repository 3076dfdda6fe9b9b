"""Copies of a Trainer and of what hangs on it, by pickle, torch.save and deepcopy: before, within and after a fit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep import callbacks as all_callbacks
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers import CSVLogger
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool


def saved(part: Any) -> Any:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_value(part: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(part))


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


class Net(LightningModule):
    """Has itself looked at within a step."""

    look: Callable[[Net], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.look is not None and (self.current_epoch, batch_idx) == (1, 1):
            look, self.look = self.look, None
            look(self)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Keeps(Net):
    kept: Any

    def on_train_end(self) -> None:
        self.kept = self.optimizers()


def made(folder: Path, **flags: Any) -> Trainer:
    named = ("DeviceStatsMonitor", "LearningRateMonitor", "Timer", "TQDMProgressBar")
    callbacks: list[Callback] = [getattr(all_callbacks, name)() for name in named]
    callbacks += [ModelCheckpoint(folder, monitor="val_loss"), all_callbacks.OnExceptionCheckpoint(folder)]
    callbacks.append(all_callbacks.EarlyStopping("val_loss", patience=9))
    callbacks.append(all_callbacks.GradientAccumulationScheduler({0: 1}))
    if is_there("extras"):
        callbacks.append(all_callbacks.StochasticWeightAveraging(1e-2))
    settings = {"accelerator": "cpu", "max_epochs": 2, "logger": CSVLogger(folder), "callbacks": callbacks}
    return Trainer(**{**settings, "profiler": "simple", "enable_model_summary": False, **flags})


def parts_of(trainer: Trainer) -> Iterator[Any]:
    yield from (trainer, trainer.strategy, trainer.profiler, trainer.precision_plugin, trainer.callback_metrics)
    yield from (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    yield from (*trainer.callbacks, *trainer.loggers, *trainer.optimizers, *trainer.lr_scheduler_configs)
    module = trainer.session.module if trainer.session.has("module") else None
    if module is not None:
        yield module
        yield module.optimizers()
        yield module.lr_schedulers()


def check_all(trainer: Trainer, ways: dict[str, Callable[[Any], Any]] = WAYS) -> int:
    parts = list(parts_of(trainer))
    for part in parts:
        for way, copied in ways.items():
            assert isinstance(copied(part), type(part)), f"{way} of {type(part).__name__}"
    return len(parts)


def looked_at(folder: str, strategy: str) -> list[int]:
    seen = []
    # a rank of the pool has the classes of this file by value
    ways = WAYS if strategy == "auto" else {"cloudpickle": by_value, "deepcopy": copy.deepcopy}
    trainer, module = made(Path(folder), strategy=strategy, devices=1 if strategy == "auto" else 2), Net()
    seen.append(check_all(trainer, ways))
    module.look = lambda module: seen.append(check_all(module.trainer, ways))
    trainer.fit(module)
    seen.append(check_all(trainer, ways))
    return seen


def test_a_trainer_could_not_be_copied(tmp_path: Path) -> None:
    """Before a fit by a lambda, within one by a generator, behind it by an optimizer that says it is another class."""
    before, within, after = looked_at(str(tmp_path), "auto")
    assert before < within == after


def test_nor_one_of_several_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for before, within, after in ranks(2).run(looked_at, str(tmp_path), "ddp"):
        assert before < within == after


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_where_the_trainer_was(way: str, tmp_path: Path) -> None:
    copies: list[Trainer] = []
    trainer, module = made(tmp_path), Net()
    module.look = lambda module: copies.append(WAYS[way](module.trainer))
    trainer.fit(module)
    (within,), after = copies, WAYS[way](trainer)
    assert (within.current_epoch, within.global_step) == (1, 5)
    assert (after.current_epoch, after.global_step) == (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert after.callback_metrics == trainer.callback_metrics
    assert after.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    after.fit_loop.max_epochs = 3
    assert after.fit(Net()).global_step == 12
    assert within.fit(Net()).stopped == "max_epochs=2 reached"
    assert trainer.global_step == 8
    with pytest.raises(MisconfigurationException, match="a copy of a Trainer has set up nothing"):
        WAYS[way](trainer).save_checkpoint(tmp_path / "copy.ckpt")


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_optimizer_steps_alone(way: str) -> None:
    trainer, module = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False), Keeps()
    trainer.fit(module)
    copied = WAYS[way](module.kept)
    assert isinstance(copied, torch.optim.SGD)
    (weight, _) = copied.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    copied.step()
    assert torch.equal(weight, before - copied.param_groups[0]["lr"])
    assert not torch.equal(weight, module.layer.weight)
    with pytest.raises(MisconfigurationException, match="this is a copy, which belongs to no fit"):
        with copied.toggle_model():
            pass
    assert type(WAYS[way](module).kept) is type(module.kept)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp"])
def test_a_copy_starts_its_ranks(strategy: str) -> None:
    """It ran in one process, as if that were a rank of its own."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    for way in WAYS.values():
        copied = way(trainer)
        assert copied._spawns == trainer._spawns
        assert type(copied._launch.__self__) is type(trainer._launch.__self__)  # type: ignore[attr-defined]


def refused(folder: str) -> list[str]:
    said = []

    def look(module: Net) -> None:
        for way in WAYS.values():
            try:
                way(module.trainer)
            except NotImplementedError as error:
                said.append(str(error))

    module = Net()
    module.look = look
    made(Path(folder), strategy="fsdp", devices=2, callbacks=None, profiler=None).fit(module)
    return said


def test_a_model_in_parts_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(refused, str(tmp_path)):
        assert len(said) == len(WAYS)
        assert all("FSDPStrategy cannot be copied or pickled once a call has set it up" in text for text in said)
