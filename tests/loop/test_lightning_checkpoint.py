"""A checkpoint that Lightning 2.6.6 wrote (data/make_lightning_checkpoint.py made it) loads, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from tests.loop.pieces import quiet

WRITTEN = Path(__file__).parent / "data" / "lightning-2.6.6.ckpt"
# what Lightning's own fit went on to, as make_lightning_checkpoint.py prints it
FINAL = [0.68685314726108, 0.7239603083617661, 0.2087269985413818]


class Regression(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_it_loads_with_its_hyperparameters() -> None:
    module = Regression.load_from_checkpoint(WRITTEN)
    assert module.hparams == {"lr": 0.2}
    assert not torch.equal(module.layer.weight, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert Regression.load_from_checkpoint(WRITTEN, lr=0.3).hparams == {"lr": 0.3}


def test_training_goes_on_from_it_as_lightnings_did() -> None:
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)  # type: ignore[arg-type]
    module = Regression(lr=0.2)
    trainer = quiet(max_epochs=2)
    result = trainer.fit(module, data, ckpt_path=WRITTEN)
    assert (module.steps, result.epochs, result.global_step) == (3, 2, 6)
    found = [*module.layer.weight.flatten().tolist(), module.layer.bias.item()]
    assert found == pytest.approx(FINAL, rel=1e-14)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


class Monitored(Regression):
    """Logs a loss of each stage; a scheduler may watch one."""

    def __init__(self, monitor: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer.reset_parameters()
        self.monitor = monitor
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations += batch_idx == 0
        self.log("val", (self.layer(batch) - 1).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if self.monitor is None:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def counted(ready: int, completed: int, processed: int, last: bool, total: int | None = None) -> dict[str, Any]:
    current = {"ready": ready, "completed": completed, "started": processed, "processed": processed}
    all_of = current if total is None else dict.fromkeys(current, total)
    return {"current": current, "total": all_of, "is_last_batch": last}


# What Lightning 2.6.6 counts of an epoch's last batch of three, and of a validation of three: in which hook it saved.
LAST_BATCH = {
    "on_train_batch_end": (counted(3, 2, 3, True), counted(0, 0, 0, False), True),
    "on_train_batch_end, later": (counted(3, 2, 3, True), counted(3, 3, 3, True, total=0), True),
    "on_validation_start": (counted(3, 3, 3, True), counted(0, 0, 0, False), True),
    "on_validation_batch_end": (counted(3, 3, 3, True), counted(1, 0, 1, False), True),
    "on_validation_end": (counted(3, 3, 3, True), counted(3, 3, 3, True), False),
}
WATCHING: dict[str, tuple[str | None, Any]] = {
    "EarlyStopping of training": (None, lambda folder: EarlyStopping("train")),
    "EarlyStopping of validation": (None, lambda folder: EarlyStopping("val")),
    "ReduceLROnPlateau of training": ("train", lambda folder: Callback()),
    "ReduceLROnPlateau of validation": ("val", lambda folder: Callback()),
    "ModelCheckpoint of training": (
        None,
        lambda folder: ModelCheckpoint(folder, monitor="train", save_on_train_epoch_end=True),
    ),
    "ModelCheckpoint of validation": (None, lambda folder: ModelCheckpoint(folder, monitor="val")),
}


@pytest.mark.everyday
@pytest.mark.parametrize("watching", WATCHING)
@pytest.mark.parametrize("hook", LAST_BATCH)
def test_a_checkpoint_of_an_epochs_last_batch_goes_on_beside_what_watches_a_metric(
    hook: str, watching: str, tmp_path: Path
) -> None:
    """What the epoch has logged is not in Lightning's file: EarlyStopping raised. The validation was left out, too."""
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)  # type: ignore[arg-type]
    path, (monitor, make) = tmp_path / "last.ckpt", WATCHING[watching]
    whole = Monitored(monitor)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    flags: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    quiet(**flags, callbacks=[Save(), make(tmp_path / "whole")], default_root_dir=tmp_path).fit(whole, data, data)
    batches, validation, is_due = LAST_BATCH[hook]
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lockstep"]
    checkpoint["loops"]["fit_loop"] |= {
        "epoch_loop.batch_progress": batches,
        "epoch_loop.val_loop.batch_progress": validation,
        "epoch_progress": {"current": {"ready": 1, "completed": 0, "started": 1, "processed": 0}},
    }
    torch.save(checkpoint, path)
    module, trainer = Monitored(monitor), quiet(**flags, callbacks=[make(tmp_path / "on")], default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="after 3 batches of epoch 0, and it does not hold what they logged"):
        result = trainer.fit(module, data, data, ckpt_path=path)
    assert (result.epochs, result.global_step, module.validations) == (2, 6, 1 + is_due)
    assert module.layer.weight.tolist() == whole.layer.weight.tolist()
