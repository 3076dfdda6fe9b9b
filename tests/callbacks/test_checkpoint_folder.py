"""A folder of checkpoints that several runs have: at once, one after the other, or after a kill."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop import state
from tests.loop.pieces import Slope, numbers, quiet


def fit(folder: Path, epochs: int = 1, ckpt_path: Any = None, *, also: Any = (), **options: Any) -> Any:
    keep = ModelCheckpoint(folder, **options)
    trainer = quiet(max_epochs=epochs, callbacks=[keep, *also], enable_checkpointing=True)
    trainer.fit(Slope(lr=0.1), numbers(2), ckpt_path=ckpt_path)
    return trainer


@contextmanager
def another_run(folder: Path) -> Iterator[None]:
    """As another process marks the folder in which it saves."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_what_a_killed_run_was_writing_is_removed_by_the_next_run(tmp_path: Path) -> None:
    """It stayed where no file of the same name was written again."""
    (tmp_path / ".epoch=1-loss=0.1.ckpt.999999-999999.part").write_bytes(b"half")
    half = tmp_path / ".epoch=1-loss=0.2.ckpt.999999-999999-aabbccdd.part"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".notes.part").write_text("of the user")
    (tmp_path / ".b.ckpt.12345678.part").symlink_to("nowhere")
    moved_aside = tmp_path / ".old.ckpt.aabbccdd.part"
    moved_aside.mkdir()
    (moved_aside / "index.json").write_text("{}")
    fit(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".notes.part", "epoch=0-step=2.ckpt", "old.ckpt"]


def test_what_a_living_run_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / ".a.ckpt.1-1.part"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fit(tmp_path)
        assert path.exists()


def test_of_two_runs_at_once_none_takes_the_last_checkpoint_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "PATIENCE", 0.0)
    fit(tmp_path, save_last=True)
    with another_run(tmp_path):
        with pytest.raises(MisconfigurationException, match=r'"last".*another process is saving its run in'):
            fit(tmp_path, 2, "last", save_last=True)
        with pytest.warns(UserWarning, match="another process is saving checkpoints in .* at the same time"):
            fit(tmp_path, save_last=True)
        looks_on = quiet(callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
        looks_on.validate(Validated(), numbers(1), ckpt_path="last")
    assert fit(tmp_path, 2, "last", save_last=True).global_step == 4


class Validated(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.w)


def test_without_a_last_file_the_step_in_the_files_decides_and_not_their_times(tmp_path: Path) -> None:
    """A copy of a folder may have given its files any times."""
    fit(tmp_path, 3, save_top_k=-1)
    for seconds, name in enumerate(["epoch=2-step=6", "epoch=0-step=2", "epoch=1-step=4"]):
        os.utime(tmp_path / f"{name}.ckpt", (seconds, seconds))
    assert fit(tmp_path, 4, "last", save_top_k=-1).ckpt_path == str(tmp_path / "epoch=2-step=6.ckpt")
    (tmp_path / "damaged.ckpt").write_bytes(b"no checkpoint")  # whose step nobody knows
    os.utime(tmp_path / "epoch=1-step=4.ckpt", (2**31, 2**31))
    assert fit(tmp_path, 5, "last", save_top_k=-1).ckpt_path == str(tmp_path / "epoch=1-step=4.ckpt")


@pytest.mark.parametrize("link", [True, "link"])
def test_a_run_that_was_resumed_keeps_the_name_of_its_last_checkpoint(tmp_path: Path, link: Any) -> None:
    """last.ckpt stayed a link to the first checkpoint, as this one was written before it and knew no last one."""
    for steps in (2, 8):
        keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=link)
        trainer = quiet(max_steps=steps, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(Slope(), numbers(10), ckpt_path=str(tmp_path / "epoch=0-step=2.ckpt") if steps > 2 else None)
    assert [name for name in os.listdir(tmp_path) if "last" in name] == ["last.ckpt"]
    assert step_of(tmp_path / "last.ckpt") == 8


def test_a_checkpoint_that_the_user_has_named_to_resume_from_is_never_deleted(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    named = tmp_path / "epoch=0-step=2.ckpt"
    fit(tmp_path, 2, str(named))
    fit(tmp_path, 3, "last")
    assert sorted(os.listdir(tmp_path)) == [named.name, "epoch=2-step=6.ckpt"]
