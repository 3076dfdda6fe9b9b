"""What writes a Trainer's checkpoints can be exchanged; without a plugin it is the format of `checkpoint/format.py`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lockstep.checkpoint import format
from lockstep.plugins.io import CheckpointIO, TorchCheckpointIO  # type: ignore[import-not-found]
from tests.loop import pieces
from tests.loop.pieces import Slope, numbers
from tests.tools.pool import RankPool

quiet = partial(pieces.quiet, enable_checkpointing=None)
on_ranks = partial(pieces.on_ranks, enable_checkpointing=None)


class Validated(Slope):
    """`Slope` that logs its weight, so that later epochs are better or worse."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.w.detach())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.w.detach())


def written_for(base: type, calls: list[Any]) -> Any:
    """A CheckpointIO as one writes it for Lightning: files of another name, by torch alone."""

    class Elsewhere(base):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(("save", os.path.basename(path)))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(checkpoint, f"{path}.mine")

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
            calls.append(("load", os.path.basename(path)))
            return torch.load(f"{path}.mine", map_location=map_location, weights_only=False)

        def remove_checkpoint(self, path: Any) -> None:
            calls.append(("remove", os.path.basename(path)))
            os.remove(f"{path}.mine")

        def teardown(self) -> None:
            calls.append("teardown")

    return Elsewhere()


# -- by default ------------------------------------------------------------------------------------------------


def test_the_default_writes_the_file_of_the_format(tmp_path: Path) -> None:
    io, path = quiet().strategy.checkpoint_io, tmp_path / "x.ckpt"
    assert type(io) is TorchCheckpointIO
    io.save_checkpoint({"a": 1}, path)
    assert format.load(path)["a"] == io.load_checkpoint(path)["a"] == 1
    io.remove_checkpoint(path)
    assert not path.exists()


def test_options_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    """They were ignored."""
    trainer = quiet(max_epochs=1, enable_checkpointing=False)
    trainer.fit(Slope(), numbers(2))
    with pytest.raises(TypeError, match=r"storage_options=\{'acl': 1\}.*TorchCheckpointIO takes no storage options"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"acl": 1})
    assert os.listdir(tmp_path) == []


# -- the user's ------------------------------------------------------------------------------------------------


def test_a_checkpoint_io_of_the_users_writes_reads_and_removes(tmp_path: Path) -> None:
    calls: list[Any] = []
    io = written_for(CheckpointIO, calls)
    keep = ModelCheckpoint(tmp_path, monitor="val", filename="{epoch}", save_last=True)
    trainer = quiet(plugins=[io], max_epochs=2, callbacks=[keep])
    assert trainer.strategy.checkpoint_io is io
    trainer.fit(Validated(lr=1.0), numbers(1), numbers(1))
    assert calls == [
        *[("save", "epoch=0.ckpt"), ("save", "last.ckpt")],
        *[("save", "epoch=1.ckpt"), ("save", "last.ckpt"), ("remove", "epoch=0.ckpt"), "teardown"],
    ]
    assert sorted(os.listdir(tmp_path)) == ["epoch=1.ckpt.mine", "last.ckpt.mine"]
    calls.clear()
    trainer.test(dataloaders=numbers(1), ckpt_path="best", verbose=False)
    assert calls == [("load", "epoch=1.ckpt"), "teardown"]
    assert trainer.callback_metrics["tested"] == -2
    calls.clear()
    again = quiet(plugins=io, max_epochs=3, enable_checkpointing=False)
    module = Validated(lr=1.0)
    again.fit(module, numbers(1), numbers(1), ckpt_path=tmp_path / "last.ckpt")
    assert module.w.item() == -3
    again.save_checkpoint(tmp_path / "after.ckpt", storage_options=1)
    assert calls == [("load", "last.ckpt"), "teardown", ("save", "after.ckpt"), "teardown"]


def test_a_run_that_torch_save_wrote_is_a_checkpoint(tmp_path: Path) -> None:
    """It has lockstep's key and no hash, and was refused as damaged."""
    trainer = quiet(plugins=written_for(CheckpointIO, []), max_epochs=1, enable_checkpointing=False)
    trainer.fit(Slope(lr=1.0), numbers(2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert Slope.load_from_checkpoint(tmp_path / "x.ckpt.mine").w.item() == -3
    module = Slope(lr=1.0)
    quiet(max_epochs=2, enable_checkpointing=False).fit(module, numbers(2), ckpt_path=tmp_path / "x.ckpt.mine")
    assert module.w.item() == -6


def test_what_saves_a_failed_run_goes_there_too(tmp_path: Path) -> None:
    class Fails(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("bad batch")
            return super().training_step(batch, batch_idx)

    calls: list[Any] = []
    trainer = quiet(plugins=written_for(CheckpointIO, calls), max_epochs=1, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ValueError, match="bad batch"):
        trainer.fit(Fails(), numbers(2))
    assert calls == [("save", "on_exception.ckpt"), "teardown"]


# -- ranks -----------------------------------------------------------------------------------------------------


class Refuses(TorchCheckpointIO):  # type: ignore[misc]
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise OSError("no room")


def said_by(plugin: Any, folder: Path) -> str:
    trainer = on_ranks(plugins=plugin, max_epochs=1, callbacks=[ModelCheckpoint(folder)])
    try:
        trainer.fit(Slope(), numbers(4))
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}, {trainer.state.status}"
    return "nothing"


def test_an_error_of_rank_0_is_one_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(partial(said_by, Refuses()), tmp_path, timeout=40)
    assert first == "OSError: no room, interrupted"
    assert second.startswith("RankFailed: rank 0 could not write the checkpoint")
    assert "OSError: no room, interrupted" in second


def fit_on_ranks(folder: Path) -> list[Any]:
    calls: list[Any] = []
    trainer = on_ranks(plugins=written_for(CheckpointIO, calls), max_epochs=1, callbacks=[ModelCheckpoint(folder)])
    trainer.fit(Slope(), numbers(4))
    trainer.fit(Slope(), numbers(4), ckpt_path="best")
    return calls


def test_rank_0_writes_and_every_rank_reads(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(fit_on_ranks, tmp_path, timeout=40)
    name = "epoch=0-step=2.ckpt"
    assert first == [("save", name), "teardown", ("load", name), "teardown"]
    assert second == [("load", name), "teardown"]
