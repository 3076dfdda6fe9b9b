"""What a module does in `on_train_batch_end` belongs to the batch: it is in the checkpoint of that step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import Callback, Checkpoint, ModelCheckpoint
from tests.loop.pieces import SaveAt, quiet


class Averaged(LightningModule):
    """Keeps a slow copy of its weight, which its loss is held against."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fast, self.slow = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.path = path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.fast(batch) - self.slow(batch) - 1.0).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.fast.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.3)
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), batch_size=2)  # type: ignore[arg-type]


def test_an_average_that_the_module_moves_behind_a_batch_is_in_the_batchs_checkpoint(tmp_path: Path) -> None:
    """ModelCheckpoint saved before the module's hook: a run that went on from it ended with other weights."""
    whole = Averaged()
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(whole, loader())
    for step in (1, 2, 4):
        resumed = Averaged()
        quiet(max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / f"step={step}.ckpt")
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), (step, name)


class SaveBehind(SaveAt, Checkpoint):
    """A saver that comes behind the module."""


@pytest.mark.parametrize(
    ("module", "callbacks", "said"),
    [
        (Averaged, lambda path: [SaveAt(1, path)], True),
        (Averaged, lambda path: [SaveBehind(1, path)], False),
        (Averaged, lambda path: [], False),
        (
            type("Plain", (Averaged,), {"on_train_batch_end": LightningModule.on_train_batch_end}),
            lambda path: [SaveAt(1, path)],
            False,
        ),
    ],
    ids=["before the module", "behind it", "by the module", "no hook"],
)
def test_a_callback_that_saves_before_the_modules_hook_is_told(
    tmp_path: Path, module: type[Averaged], callbacks: Any, said: bool
) -> None:
    own: list[Callback] = callbacks(tmp_path / "a.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(max_epochs=1, callbacks=own, enable_checkpointing=any(isinstance(c, Checkpoint) for c in own))
        trainer.fit(module(None if own else tmp_path / "a.ckpt"), loader())
    told = [str(each.message) for each in caught if "has run for this batch" in str(each.message)]
    assert len(told) == said, told
    assert not told or "SaveAt.on_train_batch_end, before Averaged.on_train_batch_end" in told[0]
    assert (tmp_path / "a.ckpt").exists()
