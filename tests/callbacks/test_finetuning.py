"""Finetuning: what is frozen when, beside Lightning, over a resume and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import QUIET, on_ranks, quiet
from tests.tools.pool import RankPool

EPOCHS = 5


def data(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def network(norm: bool = True) -> tuple[nn.Module, nn.Module]:
    """A backbone and a head; BatchNorm in both, of one shape and with equal values."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 4))
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return backbone.double(), head.double()


def module_of(library: Any, norm: bool = True, momentum: float = 0.9) -> Any:
    """The module on the LightningModule of either library; ``weights`` notes all of them after each batch."""

    class Net(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = network(norm)
            self.weights: list[list[Tensor]] = []
            self.rates: list[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.head(self.backbone(x)), y)

        def on_train_batch_end(self, *args: Any) -> None:
            self.weights.append([value.detach().clone() for value in self.state_dict().values()])
            self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.SGD(parameters, lr=0.05, momentum=momentum)

    return Net()


def assert_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    assert len(ours) == len(theirs) > 0
    for step, pair in enumerate(zip(ours, theirs, strict=True)):
        for mine, other in zip(*pair, strict=True):
            assert torch.equal(mine, other), f"step {step}"


SETTINGS: list[dict[str, Any]] = [
    {"unfreeze_backbone_at_epoch": 2},
    {"unfreeze_backbone_at_epoch": 1, "lambda_func": lambda epoch: 1.5, "backbone_initial_ratio_lr": 0.5},
    {"unfreeze_backbone_at_epoch": 1, "backbone_initial_lr": 0.01, "lambda_func": lambda e: e, "should_align": False},
    {"unfreeze_backbone_at_epoch": 1, "train_bn": False, "verbose": True},
    {"unfreeze_backbone_at_epoch": 99},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_backbone_is_trained_as_lightning_trains_it(
    settings: dict[str, Any], tmp_path: Path, lightning: Any
) -> None:
    theirs, ours = module_of(lightning), module_of(lockstep)
    finetuning = lightning.callbacks.BackboneFinetuning(**settings)
    lightning.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=EPOCHS, callbacks=finetuning).fit(theirs, data())
    quiet(order="torch", max_epochs=EPOCHS, callbacks=BackboneFinetuning(**settings)).fit(ours, data())
    assert ours.rates == theirs.rates
    assert_same(ours.weights, theirs.weights)


class ByName(BaseFinetuning):
    """Freezes the backbone, BatchNorm too, and thaws it in the middle of training."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.01)
        if epoch == 3:
            self.unfreeze_and_add_param_group(pl_module.backbone[1:], optimizer, train_bn=False)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("callback", [lambda: BackboneFinetuning(1), ByName])
@pytest.mark.parametrize("stop_at", [1, 6, 10, 15])
def test_a_resume_is_bitwise_the_run_that_went_on(callback: Any, stop_at: int, tmp_path: Path) -> None:
    """Lightning 2.6.6 freezes the backbone again when a run resumes after it was thawed, and trains it no more."""
    whole = module_of(lockstep)
    quiet(max_epochs=EPOCHS, callbacks=callback()).fit(whole, data())
    begun = module_of(lockstep)
    trainer = quiet(max_steps=stop_at, max_epochs=EPOCHS, callbacks=callback())
    trainer.fit(begun, data())
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    resumed = module_of(lockstep)
    trainer = quiet(max_epochs=EPOCHS, callbacks=callback())
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "here.ckpt")
    assert_same(begun.weights + resumed.weights, whole.weights)
    assert begun.rates + resumed.rates == whole.rates


def test_a_checkpoint_of_lightnings_is_gone_on_from_with_the_backbone_thawed(tmp_path: Path, lightning: Any) -> None:
    finetuning = lightning.callbacks.BackboneFinetuning(1)
    trainer = lightning.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=3, callbacks=finetuning)
    trainer.fit(module_of(lightning), data())
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    resumed, whole = module_of(lockstep), module_of(lockstep)
    quiet(order="torch", max_epochs=EPOCHS, callbacks=BackboneFinetuning(1)).fit(whole, data())
    quiet(order="torch", max_epochs=EPOCHS, callbacks=BackboneFinetuning(1)).fit(
        resumed, data(), ckpt_path=tmp_path / "theirs.ckpt"
    )
    assert resumed.rates == whole.rates[12:]
    assert_same(resumed.weights, whole.weights[12:])


def test_a_second_fit_begins_with_the_backbone_frozen() -> None:
    finetuning = BackboneFinetuning(1, backbone_initial_lr=0.02)
    for _ in range(2):
        net = module_of(lockstep)
        quiet(max_epochs=3, callbacks=finetuning).fit(net, data(16))
        assert net.rates == [[0.05], [0.05, 0.02], [0.05, 0.04]]


# -- on ranks ----------------------------------------------------------------------------------------------


class AndBack(BaseFinetuning):
    """Thaws the backbone at epoch 1, freezes it in epoch 2, thaws it again in epoch 3."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)
        elif epoch == 2:
            self.freeze(pl_module.backbone)
        elif epoch == 3:
            self.make_trainable(pl_module.backbone)


CALLBACKS = {"backbone": lambda: BackboneFinetuning(2), "and back": AndBack}


def fit_on_ranks(kind: str, folder: str | None = None, momentum: float = 0.9) -> list[list[Tensor]]:
    """A run; with a folder one that stops after 9 steps and is resumed."""
    weights: list[list[Tensor]] = []
    for life in [0] if folder is None else [1, 2]:
        net = module_of(lockstep, norm=False, momentum=momentum)
        trainer = on_ranks(
            max_epochs=EPOCHS, max_steps=9 if life == 1 else -1, callbacks=CALLBACKS[kind](), order="torch"
        )
        size = torch.distributed.get_world_size()
        trainer.fit(net, data(4 // size), ckpt_path=f"{folder}/c.ckpt" if life == 2 else None)
        if life == 1:
            trainer.save_checkpoint(f"{folder}/c.ckpt")
        weights += net.weights
    return weights


@pytest.mark.parametrize("kind", CALLBACKS)
def test_thawed_parameters_are_reduced_over_the_ranks(ranks: RankPool, kind: str) -> None:
    alone = module_of(lockstep, norm=False)
    quiet(max_epochs=EPOCHS, callbacks=CALLBACKS[kind](), order="torch").fit(alone, data(4))
    first, second = ranks(2).run(fit_on_ranks, kind, timeout=60)
    assert_same(first, second)
    for mine, one in zip(first, alone.weights, strict=True):
        for value, expected in zip(mine, one, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


def test_a_resume_on_ranks_is_bitwise_the_run_that_went_on(ranks: RankPool, tmp_path: Path) -> None:
    pool = ranks(2)
    whole, _ = pool.run(fit_on_ranks, "backbone", timeout=60)
    first, second = pool.run(fit_on_ranks, "backbone", str(tmp_path), timeout=60)
    assert_same(first, whole)
    assert_same(second, whole)


# -- the tools ---------------------------------------------------------------------------------------------


class Owner(nn.Module):
    """A parameter of its own beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_freezing_thawing_and_filtering() -> None:
    owner = Owner()
    norm = owner.inner[1]
    BaseFinetuning.freeze(owner)
    assert list(BaseFinetuning.filter_params(owner)) == [norm.weight, norm.bias]
    assert list(BaseFinetuning.filter_params(owner, train_bn=False)) == []
    assert norm.track_running_stats
    BaseFinetuning.freeze([owner], train_bn=False)
    assert not norm.track_running_stats
    assert len(list(BaseFinetuning.filter_params(owner, requires_grad=False))) == 5
    BaseFinetuning.make_trainable(owner.inner)
    assert norm.track_running_stats
    assert [p is owner.scale for p in BaseFinetuning.filter_params(owner, requires_grad=False)] == [True]
    BaseFinetuning.freeze_module(owner.inner)  # has no parameters of its own
    assert len(list(BaseFinetuning.filter_params(owner.inner))) == 4


def test_parameters_of_equal_value_are_not_taken_for_one() -> None:
    """Lightning 2.6.6 compares values: the BatchNorm of a backbone is left out if that of the head is as new."""
    head, backbone = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    BaseFinetuning.unfreeze_and_add_param_group(backbone, optimizer)
    assert [p is q for p, q in zip(optimizer.param_groups[1]["params"], backbone.parameters(), strict=True)] == [
        True
    ] * 2
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_parameters_that_are_in_the_optimizer_already_are_named() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match="2 parameters .* are in another group"):
        BaseFinetuning.unfreeze_and_add_param_group(layer, optimizer)
    assert len(optimizer.param_groups) == 1


class Scheduled(lockstep.LightningModule):
    """Its scheduler is stepped by step; the backbone is in the optimizer from the start, or when it is thawed."""

    def __init__(self, scheduler: Any, of_all: bool) -> None:
        super().__init__()
        self.backbone, self.head = network()
        self.scheduler, self.of_all = scheduler, of_all

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.backbone(x)), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD((self if self.of_all else self.head).parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": "step"}]


SCHEDULERS = {
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_that_was_made_for_fewer_groups_is_named(kind: str) -> None:
    """torch's words are `zip() argument 2 is longer than argument 1`."""
    said = f"has 2 parameter groups by now, and the lr scheduler {kind} was"
    trainer = quiet(max_epochs=3, callbacks=[BackboneFinetuning(1)])
    with pytest.raises(MisconfigurationException, match=said):
        trainer.fit(Scheduled(SCHEDULERS[kind], of_all=False), data())
    quiet(max_epochs=3, callbacks=[BackboneFinetuning(1)]).fit(Scheduled(SCHEDULERS[kind], of_all=True), data())
