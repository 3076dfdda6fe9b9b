"""A run that is killed within any save, and resumed, leaves the files that it leaves where nobody kills it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.plugins.io import TorchCheckpointIO
from tests.loop.pieces import numbers, quiet

LOSSES = (5.0, 4.0, 6.0, 3.0)


class Net(LightningModule):
    """Logs one of `LOSSES` at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def on_train_epoch_end(self) -> None:
        self.log("loss", LOSSES[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Killed(BaseException):
    pass


class KilledIO(TorchCheckpointIO):
    """Ends the run before or after one of the things that are done to files."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after, self.count = at, after, 0

    def _act(self, action: Any) -> None:
        self.count += 1
        if self.count == self.at and not self.after:
            raise Killed
        action()
        if self.count == self.at:
            raise Killed

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self._act(partial(super().save_checkpoint, checkpoint, path, storage_options))

    def remove_checkpoint(self, path: Any) -> None:
        self._act(partial(super().remove_checkpoint, path))

    def then(self, action: Any) -> None:
        self._act(action)


def fit(folder: Path, options: dict[str, Any], io: Any = None) -> ModelCheckpoint:
    keep = ModelCheckpoint(folder, **options)
    plugins = [] if io is None else [io]
    trainer = quiet(max_epochs=len(LOSSES), callbacks=[keep], plugins=plugins, enable_checkpointing=True)
    trainer.fit(Net(), numbers(2), ckpt_path="last")
    return keep


def found(folder: Path) -> dict[str, int]:
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in folder.iterdir()}


EVERYDAY: list[dict[str, Any]] = [
    {"save_last": True},
    {"save_last": "link", "monitor": "loss", "save_top_k": 2},
    {"monitor": "loss", "save_top_k": 2},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"save_last": "link"},
    {"save_last": True, "monitor": "loss", "save_top_k": 2},
    {"save_last": True, "monitor": "loss", "mode": "max", "save_top_k": 3, "filename": "{epoch}-{loss:.1f}"},
    {"save_last": True, "save_top_k": -1},
]


@pytest.mark.parametrize("options", [*EVERYDAY, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
@pytest.mark.filterwarnings("ignore")
def test_a_kill_within_a_save_leaves_no_more_files_than_a_run_without(options: dict[str, Any], tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", options)
    acts = 0
    for after in (False, True):
        at = 1
        while True:
            folder, io = tmp_path / f"{at}-{after}", KilledIO(at, after=after)
            try:
                fit(folder, options, io)
            except Killed:
                pass
            else:
                break
            again = fit(folder, options)
            assert found(folder) == found(tmp_path / "whole"), (at, after)
            scores = [{Path(k).name: float(v) for k, v in keep.best_k_models.items()} for keep in (whole, again)]
            assert scores[0] == scores[1], (at, after)
            at += 1
        acts += at
    assert acts > 2 * len(LOSSES)
