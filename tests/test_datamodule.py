"""LightningDataModule: hooks, hyperparameters, data sets without a class, checkpoints."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lockstep.datamodule import LightningDataModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict
from tests.data.loaders import Stream, numbers


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 32, folder: str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict


def test_hooks_that_are_not_there_say_what_to_define() -> None:
    data = Digits()
    for name in ("train", "val", "test", "predict"):
        with pytest.raises(MisconfigurationException, match=rf"Digits has no {name}_dataloader"):
            getattr(data, f"{name}_dataloader")()
    batch = [torch.ones(2), {"x": torch.zeros(1)}]
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert data.on_after_batch_transfer(batch, 0) is batch
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0)[1]["x"].equal(torch.zeros(1))
    assert data.trainer is None
    assert data.hparams.batch_size == 32


def test_from_datasets() -> None:
    data = LightningDataModule.from_datasets(numbers(9), [numbers(4), numbers(5)], {"a": numbers(3)}, batch_size=2)
    train = data.train_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert train.batch_size == 2
    validation = data.val_dataloader()
    assert [len(each.dataset) for each in validation] == [4, 5]
    assert not isinstance(validation[0].sampler, RandomSampler)
    assert isinstance(data.test_dataloader()["a"], DataLoader)
    with pytest.raises(MisconfigurationException, match="predict_dataloader"):
        data.predict_dataloader()
    assert LightningDataModule.from_datasets(Stream(3)).train_dataloader().batch_size == 1


def test_from_datasets_hands_init_what_it_takes() -> None:
    data = Digits.from_datasets(numbers(9), batch_size=7, folder="elsewhere")
    assert (data.hparams.batch_size, data.hparams.folder) == (7, "elsewhere")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    hparams = {"batch_size": 8, "folder": "here"}
    torch.save({"datamodule_hyper_parameters": hparams, "Digits": {"seen": 3}, "state_dict": {}}, path)
    return path


def test_load_from_checkpoint(checkpoint: Path) -> None:
    data = Digits.load_from_checkpoint(checkpoint, folder="there")
    assert dict(data.hparams) == {"batch_size": 8, "folder": "there"}
    assert data.seen == {"seen": 3}


def test_load_from_checkpoint_with_a_file_of_hyperparameters(checkpoint: Path) -> None:
    pytest.importorskip("yaml")
    (checkpoint.parent / "hparams.yaml").write_text("batch_size: 5\n")
    data = Digits.load_from_checkpoint(checkpoint, hparams_file=checkpoint.parent / "hparams.yaml")
    assert dict(data.hparams) == {"batch_size": 5, "folder": "data"}


@pytest.mark.parametrize("module", ["lightning.fabric.utilities.data", "pytorch_lightning.utilities.parsing"])
def test_load_from_checkpoint_of_a_lightning_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    theirs = types.ModuleType(module)
    theirs.AttributeDict = type("AttributeDict", (dict,), {"__module__": module})  # type: ignore[attr-defined]
    with monkeypatch.context() as installed:
        parts = module.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            installed.setitem(sys.modules, name, types.ModuleType(name))
        installed.setitem(sys.modules, module, theirs)
        torch.save({"datamodule_hyper_parameters": theirs.AttributeDict(batch_size=4)}, tmp_path / "a.ckpt")
    assert Digits.load_from_checkpoint(tmp_path / "a.ckpt").hparams.batch_size == 4


def test_a_single_argument_takes_all_hyperparameters(tmp_path: Path) -> None:
    class Whole(LightningDataModule):
        def __init__(self, settings: Any) -> None:
            super().__init__()
            self.settings = settings

    saved = {"datamodule_hyper_parameters": {"depth": 3}, "datamodule_hparams_name": "settings"}
    torch.save(saved, tmp_path / "a.ckpt")
    loaded = Whole.load_from_checkpoint(tmp_path / "a.ckpt")
    assert isinstance(loaded.settings, AttributeDict)
    assert loaded.settings.depth == 3


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path: Path) -> None:
    torch.save({"datamodule_hyper_parameters": {"folder": tmp_path}}, tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match="weights_only=False"):
        Digits.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Digits.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams.folder == tmp_path


def test_it_is_shown_with_the_lengths_of_its_data_sets() -> None:
    assert str(LightningDataModule()) == "\n".join(
        f"{{{kind} dataloader: None}}" for kind in ("Train", "Validation", "Test", "Predict")
    )
    module = LightningDataModule.from_datasets(numbers(5), [numbers(3), Stream(2)], batch_size=2)
    assert str(module).splitlines()[:2] == [
        "{Train dataloader: size=5}",
        "{Validation dataloader: 1. size=3 ; 2. size=NA}",
    ]
