"""Checkpoints that the installed Lightning has written, and hyperparameters as it keeps them."""

from __future__ import annotations

import copy
import logging
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict
from tests.loop.pieces import QUIET, quiet

pl = pytest.importorskip("lightning.pytorch")


class Body:
    """What the module is under either library."""

    def __init__(self, lr: float, model: Any = None, root: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()  # type: ignore[attr-defined]
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)  # type: ignore[attr-defined]


class Theirs(Body, pl.LightningModule): ...  # type: ignore[misc, name-defined]


class Ours(Body, LightningModule): ...


def written(folder: Path, **hparams: Any) -> tuple[Any, Path]:
    """A module that Lightning has trained, and its checkpoint."""
    net, path = Theirs(**hparams), folder / "theirs.ckpt"
    theirs_fit(net, torch.ones(2, 2), 1, max_steps=1).save_checkpoint(path)
    return net, path


def theirs_fit(net: Any, rows: Tensor, batch_size: int, ckpt_path: Path | None = None, **flags: Any) -> Any:
    """Lightning's Trainer, after a fit without a word."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**QUIET, **flags)
        trainer.fit(net, DataLoader(rows, batch_size), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer


def test_weights_and_hyperparameters_of_every_plain_kind(tmp_path: Path) -> None:
    hparams = {"lr": 0.5, "model": {"depth": 3, "sizes": [1, (2, 3)], "act": None}, "root": "data"}
    net, path = written(tmp_path, **hparams)
    back = Ours.load_from_checkpoint(path)
    assert back.hparams == hparams == net.hparams
    assert torch.equal(back.layer.weight, net.layer.weight)
    assert Ours.load_from_checkpoint(path, lr=0.1).hparams.lr == 0.1


def test_objects_in_them_need_weights_only_false(tmp_path: Path) -> None:
    _, path = written(tmp_path, lr=0.5, model=Namespace(depth=3), root=Path("data"))
    with pytest.raises(MisconfigurationException, match=r"argparse\.Namespace.*weights_only=False"):
        Ours.load_from_checkpoint(path)
    assert Ours.load_from_checkpoint(path, weights_only=False).hparams.model.depth == 3


@pytest.mark.parametrize("value", [{}, {"lr": 0.1, "depth": 3}, {"a": {"b": 1}, "long_name": "x"}])
def test_attribute_dict_is_as_lightnings(value: dict[str, Any]) -> None:
    from lightning.pytorch.utilities.parsing import AttributeDict as TheirDict

    ours, theirs = AttributeDict(value), TheirDict(value)
    for each in (ours, theirs):
        each.update(more=1)
        each.later = 2
    assert repr(ours) == repr(theirs)
    assert ours == theirs
    assert type(ours.copy()) is type(theirs.copy())
    assert (type(copy.copy(ours)), type(copy.deepcopy(ours))) == (AttributeDict, AttributeDict)
    assert hasattr(ours, "nothing") == hasattr(theirs, "nothing")


def test_lightning_goes_on_from_our_checkpoint_at_its_step(tmp_path: Path) -> None:
    """It began to count at 0: the counters of its optimizers were not in the file."""
    ours, net = quiet(max_epochs=2), Theirs(lr=0.5)
    ours.fit(Ours(lr=0.5), DataLoader(torch.ones(6, 2), 2))  # type: ignore[arg-type]
    ours.save_checkpoint(tmp_path / "ours.ckpt")
    theirs = theirs_fit(net, torch.ones(6, 2), 2, tmp_path / "ours.ckpt", max_epochs=3)
    assert (theirs.global_step, theirs.current_epoch) == (9, 3)
    whole = Ours(lr=0.5)
    whole.load_state_dict(torch.load(tmp_path / "ours.ckpt", weights_only=True)["state_dict"])
    assert not torch.equal(net.layer.bias, whole.layer.bias)
