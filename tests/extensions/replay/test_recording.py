"""Recordings of gradients and weights: the same on any engine, across kills and resumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint
from lockstep.extensions.replay.hashes import TensorHash
from lockstep.extensions.replay.recording import FILE, ROW, read
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import QUIET
from tests.tools.pool import RankPool

CPU = torch.device("cpu")


class Regression(LightningModule):
    """A small MLP whose layers' sizes no number of ranks divides."""

    def __init__(self, end_at: int = -1, by_hand: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
        self.end_at = end_at
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == self.end_at:
            raise KeyboardInterrupt
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(
    folder: str, ckpt_path: str | None = None, model: Callable[[], Regression] = Regression, **flags: Any
) -> np.ndarray:
    """Train 12 steps, and return the recording."""
    seed_everything(3, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(96, 5)), batch_size=8 // flags.get("devices", 1), shuffle=True)
    saver = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "callbacks": saver, "max_epochs": 1, "record": "hashes", **flags}
    )
    trainer.fit(model(), loader, ckpt_path=ckpt_path)
    return read(folder)


def test_the_same_run_twice_has_one_recording(tmp_path: Path) -> None:
    first, second = fit(str(tmp_path / "a")), fit(str(tmp_path / "b"))
    assert len(first) == 12
    assert (first["gradients"] != 0).all()
    assert (first["weights"] != 0).all()
    assert (first == second).all()


def test_a_change_is_seen_from_its_step_on(tmp_path: Path) -> None:
    class Changed(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                batch[0][0, 0] += 1e-3

    first, changed = fit(str(tmp_path / "a")), fit(str(tmp_path / "b"), model=Changed)
    assert (first[:7] == changed[:7]).all()
    assert (first["gradients"][7:] != changed["gradients"][7:]).all()
    assert (first["weights"][7:] != changed["weights"][7:]).all()


def fit_on_ranks(folder: str, strategy: str) -> None:
    fit(f"{folder}/{strategy}", devices=2, strategy=strategy, precision="64-true")


def test_ddp_and_fsdp_have_one_recording(ranks: RankPool, tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        ranks(2).run(fit_on_ranks, str(tmp_path), strategy, timeout=60)
    recordings = [read(tmp_path / strategy) for strategy in ("ddp", "fsdp")]
    assert len(recordings[0]) == 12
    assert (recordings[0] == recordings[1]).all()


def test_a_run_that_is_interrupted_and_resumed_has_the_recording_of_one(tmp_path: Path) -> None:
    whole = fit(str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        fit(str(tmp_path / "cut"), model=partial(Regression, end_at=6))
    assert (read(tmp_path / "cut") == whole[:6]).all()
    # as a kill leaves it while a row is written
    with (tmp_path / "cut" / FILE).open("ab") as file:
        file.write(b"half")
    assert len(read(tmp_path / "cut")) == 6
    assert (fit(str(tmp_path / "cut"), "last") == whole).all()


def test_a_resume_in_another_folder_takes_the_recording_along(tmp_path: Path) -> None:
    whole = fit(str(tmp_path / "whole"))
    path = next((tmp_path / "whole").glob("*step=8.ckpt"))
    assert (fit(str(tmp_path / "other"), str(path)) == whole).all()


def test_manual_optimization_is_recorded(tmp_path: Path) -> None:
    assert (fit(str(tmp_path / "a")) == fit(str(tmp_path / "b"), model=partial(Regression, by_hand=True))).all()


def test_nothing_is_wrapped_without_a_recording(tmp_path: Path) -> None:
    class Looking(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert "step" not in vars(self.trainer.strategy)

    fit(str(tmp_path), model=Looking, record=None)
    assert not (tmp_path / FILE).exists()


def test_wrong_values_of_record() -> None:
    with pytest.raises(MisconfigurationException, match="record"):
        Trainer(**{**QUIET, "record": "everything"})
    with pytest.raises(MisconfigurationException, match="barebones"):
        Trainer(accelerator="cpu", barebones=True, record="hashes")


def test_a_row_is_16_bytes() -> None:
    assert ROW.itemsize == 16


# -- the hash ------------------------------------------------------------------------------------------------


def hashed(tensor: Tensor, name: str = "w") -> int:
    return int(TensorHash(0)({name: tensor}, CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(), (6,), (6, 4), (6, 4, 3)])
def test_each_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 8).to(dtype)
    first = hashed(tensor)
    assert hashed(tensor.clone()) == first
    assert hashed(tensor, "v") != first
    raw = tensor.clone().reshape(-1).view(torch.uint8)
    for byte in range(len(raw)):
        for bit in (1, 128):
            raw[byte] ^= bit
            assert hashed(raw.view(dtype).reshape(shape)) != first
            raw[byte] ^= bit


def test_changes_that_would_cancel_out_in_a_sum() -> None:
    tensor = torch.randn(64, 32)
    changed = [-tensor, tensor.flip(0), tensor.flip(1), tensor.roll(1, 1), tensor[:, ::2].repeat(1, 2), tensor.t()]
    assert len({hashed(tensor), *(hashed(each.reshape(64, 32)) for each in changed)}) == 7
    for dtype, row, column in [
        (torch.float32, 0, slice(2)),
        (torch.float32, slice(2), 0),
        (torch.float32, 5, slice(8)),
        (torch.float64, slice(None), slice(1, None, 2)),
    ]:
        tensor = tensor.to(dtype)
        signs = tensor.clone()
        signs[row, column] *= -1
        assert hashed(signs) != hashed(tensor)


def test_the_layout_in_memory_does_not_count() -> None:
    tensor = torch.randn(16, 9)
    assert hashed(tensor.t().contiguous().t()) == hashed(tensor)
