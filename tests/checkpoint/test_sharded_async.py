"""Checkpoints in parts that are written while training goes on: the moment's state, one at a time, errors on all."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lockstep.callbacks import Callback
from lockstep.checkpoint import dcp, sharded
from lockstep.ground import comm
from tests.checkpoint.test_sharded import Adam, check_same, fsdp, whole_of
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.crash import live
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)
LIMIT = 20.0


def fit(folder: str, callback: Callback | None = None, **flags: Any) -> Any:
    torch.manual_seed(5)
    trainer = quiet(
        strategy=fsdp(async_save=True),
        devices=dist.get_world_size(),
        precision="64-true",
        callbacks=[callback] if callback else [],
        **flags,
    )
    trainer.fit(Adam(), rows(24)(4))
    return trainer


class Saves(Callback):
    """Saves after the second step, and holds the disk until the fourth."""

    def __init__(self, folder: str) -> None:
        self.folder, self.gate, self.live, self.early = folder, threading.Event(), {}, True  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            write = dcp.Writer.write_data

            def held(writer: Any, *args: Any) -> Any:
                assert self.gate.wait(LIMIT)
                return write(writer, *args)

            self.patched = patch.object(dcp.Writer, "write_data", held)
            self.patched.start()
            trainer.save_checkpoint(f"{self.folder}/two.ckpt")
            self.live = whole_of(trainer)
        if trainer.global_step == 4:
            self.early = os.path.exists(f"{self.folder}/two.ckpt")
            self.patched.stop()
            self.gate.set()
            trainer.save_checkpoint(f"{self.folder}/four.ckpt")
            self.waited = os.path.exists(f"{self.folder}/two.ckpt")


def trains_on(folder: str) -> Any:
    saves = Saves(folder)
    fit(folder, saves, max_steps=5)
    return saves.early, saves.waited, threading.active_count(), saves.live


def test_training_goes_on_and_the_folder_has_the_moments_state(ranks: RankPool, tmp_path: Path) -> None:
    for early, waited, _, moment in ranks(2).run(trains_on, str(tmp_path), timeout=60):
        assert not early, "it was there before its bytes were let through"
        assert waited, "a second save waits for the first"
        check_same(sharded.load(tmp_path / "two.ckpt"), moment)
    assert sharded.load(tmp_path / "two.ckpt")["global_step"] == 2
    assert sharded.load(tmp_path / "four.ckpt")["global_step"] == 4
    assert sorted(os.listdir(tmp_path)) == ["four.ckpt", "two.ckpt"]


class FailsOnce(Callback):
    """The disk of rank 1 is full at the second step; a folder is saved again at the fourth."""

    def __init__(self, folder: str, again: bool) -> None:
        self.folder, self.again = folder, again

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = f"{self.folder}/last.ckpt"
        if trainer.global_step == 1:
            trainer.save_checkpoint(path)
        elif trainer.global_step == 2:
            trainer.strategy.checkpoint_io.wait()
            full = OSError(28, "no space left") if dist.get_rank() == 1 else None
            self.patched = patch.object(dcp.Writer, "write_data", side_effect=full) if full else None
            if self.patched is not None:
                self.patched.start()
            trainer.save_checkpoint(path)
        elif trainer.global_step == 4 and self.again:
            trainer.save_checkpoint(path)


def fails(folder: str, again: bool) -> tuple[str, int]:
    callback = FailsOnce(folder, again)
    with pytest.raises((OSError, RuntimeError)) as raised:
        fit(folder, callback, max_steps=5)
    if callback.patched is not None:
        callback.patched.stop()
    comm.barrier()
    return str(raised.value), sharded.load(f"{folder}/last.ckpt")["global_step"]


@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_fails_in_the_background_is_an_error_on_all_ranks_later(
    ranks: RankPool, tmp_path: Path, again: bool
) -> None:
    for said, step in ranks(2).run(fails, str(tmp_path), again, timeout=60):
        assert "no space left" in said
        assert step == 1, "the earlier checkpoint is whole"
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.slow
def test_killed_twenty_times_while_it_writes_the_earlier_one_goes_on() -> None:
    words = ["--kills", "20", "--strategy", "fsdp_async", "--data", "keyed", "--moment", "save", "write", "rename"]
    done = live([sys.executable, "-m", "tests.tools.crash_tries", *words], timeout=850)
    assert done.code == 0, done.output
    assert "; 0 of " in done.output.splitlines()[-1]
