"""`reload_dataloaders_every_n_epochs`, beside Lightning."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lockstep
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import QUIET, SaveAt, Slope, Validated, numbers, quiet


def loader(epoch: int) -> DataLoader[Any]:
    return DataLoader(torch.full((2,), 1.0 + epoch, dtype=torch.float64))  # type: ignore[arg-type]


def notes(library: Any) -> tuple[Any, Any, list[str]]:
    """A module and a data module of a library, which note the epochs in which loaders are asked for."""
    said: list[str] = []

    class Module(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            said.append(f"train {batch.item():g}")
            return self.w * batch.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            said.append(f"val {batch.item():g}")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class WithLoaders(Module):
        def train_dataloader(self) -> Any:
            said.append(f"train loader {self.trainer.current_epoch}")
            return loader(self.trainer.current_epoch)

        def val_dataloader(self) -> Any:
            said.append(f"val loader {self.trainer.current_epoch}")
            return loader(self.trainer.current_epoch)

    class Data(library.LightningDataModule):  # type: ignore[misc,name-defined]
        train_dataloader, val_dataloader = WithLoaders.train_dataloader, WithLoaders.val_dataloader

    return WithLoaders, (Module, Data), said


FLAGS = [
    {},
    {"reload_dataloaders_every_n_epochs": 1},
    {"reload_dataloaders_every_n_epochs": 2},
    {"reload_dataloaders_every_n_epochs": 3, "check_val_every_n_epoch": 2},
    {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
    {"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 0},
    {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 1},
    {"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 3},
]


@pytest.mark.everyday(8)
@pytest.mark.parametrize("source", ["module", "datamodule"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_loaders_are_asked_for_when_lightning_asks(lightning: Any, flags: dict[str, Any], source: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = []
    for library in (lockstep, lightning):
        with_loaders, (plain, data), said = notes(library)
        trainer = library.Trainer(**QUIET, max_epochs=6, **flags)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if source == "module":
                trainer.fit(with_loaders())
            else:
                trainer.fit(plain(), datamodule=data())
        seen.append(said)
    assert seen[0] == seen[1]
    assert "train loader 0" in seen[0]


def test_loaders_given_as_objects_cannot_be_made_anew() -> None:
    said = r"every_n_epochs=2\): fit\(\) got train_dataloaders and val_dataloaders as objects"
    with pytest.warns(UserWarning, match=said):
        quiet(max_epochs=1, reload_dataloaders_every_n_epochs=2).fit(Validated(), numbers(2), numbers(2))


@pytest.mark.parametrize("value", [-1, 1.5, "always", True])
def test_a_value_that_cannot_work(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match="reload_dataloaders_every_n_epochs="):
        quiet(reload_dataloaders_every_n_epochs=value)


class Reloads(Slope):
    """Draws other data in every second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def train_dataloader(self) -> Any:
        self.asked.append(self.current_epoch)
        return numbers(4 + self.current_epoch)


def test_a_resumed_fit_reloads_where_an_unbroken_one_does(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 2}
    whole = Reloads()
    quiet(max_epochs=5, **flags).fit(whole)
    assert whole.asked == [0, 2, 4]
    assert [len(whole.batches), whole.batches[8:14]] == [4 * 2 + 6 * 2 + 8, [[float(i)] for i in range(1, 7)]]
    first = quiet(max_epochs=3, **flags)
    first.fit(Reloads())
    first.save_checkpoint(tmp_path / "three.ckpt")
    second = Reloads()
    quiet(max_epochs=5, **flags).fit(second, ckpt_path=tmp_path / "three.ckpt")
    assert second.asked == [2, 4]  # not 5, which counting from the resumption would make of it
    assert second.batches == whole.batches[14:]
    third = Reloads()
    quiet(max_epochs=3, **flags).fit(third, ckpt_path=tmp_path / "three.ckpt")
    assert third.batches == []


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("asks", [False, True])
def test_a_resume_within_an_epoch_went_on_with_another_epochs_loader(asks: bool, every: int, tmp_path: Path) -> None:
    """`configure_optimizers` asks for the loader before it is known in which epoch the run goes on."""
    path = tmp_path / "within.ckpt"

    class Curriculum(Slope):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(3.0).double() + 10 * self.current_epoch)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.batches.append(batch.tolist())

        def configure_optimizers(self) -> Any:
            assert not asks or self.trainer.estimated_stepping_batches == 15
            return super().configure_optimizers()

    whole, rest, saves = Curriculum(), Curriculum(), SaveAt(0, path, epoch=3)
    for module, begin in ((whole, None), (rest, path)):
        flags = {"max_epochs": 5, "num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": every}
        quiet(**flags, callbacks=[saves] if module is whole else []).fit(module, ckpt_path=begin)
    assert rest.batches == whole.batches[19:]
