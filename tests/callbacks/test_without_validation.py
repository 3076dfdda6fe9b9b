"""Callbacks that wait for validations, in fits that have none: they act at the end of epochs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import LightningModule
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from tests.loop.pieces import numbers, quiet


class Plain(LightningModule):
    """Logs its loss, and validates only where ``validates`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch.float().mean()).square()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


class Watched(Plain):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.w)


OTHER = [
    {"check_val_every_n_epoch": 2},
    {"val_check_interval": 2},
    {"check_val_every_n_epoch": 2, "limit_val_batches": 0},
]


@pytest.mark.parametrize("flags", OTHER)
def test_checkpoints_are_saved(flags: dict[str, Any], tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=-1)
    quiet(max_epochs=4, enable_checkpointing=True, callbacks=[kept], **flags).fit(Plain(), numbers(4))
    assert len(kept.best_k_models) == 4
    assert os.path.exists(kept.best_model_path)


@pytest.mark.parametrize("flags", OTHER)
def test_early_stopping_stops(flags: dict[str, Any]) -> None:
    stopping = EarlyStopping("loss", patience=1, min_delta=1e6)
    quiet(max_epochs=6, callbacks=[stopping], **flags).fit(Plain(), numbers(4))
    assert stopping.stopped_epoch == 1


def test_with_validations_they_are_waited_for(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, monitor="val", save_top_k=-1)
    stopping = EarlyStopping("val", patience=9)
    flags: dict[str, Any] = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    quiet(max_epochs=4, callbacks=[kept, stopping], **flags).fit(Watched(), numbers(4), numbers(2))
    assert len(kept.best_k_models) == 2
