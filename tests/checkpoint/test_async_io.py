"""Checkpoints that are written while training goes on: the moment's state, in order, and nothing lost in between."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Callback
from lockstep.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lockstep.checkpoint import format
from lockstep.checkpoint.io import AsyncCheckpointIO, TorchCheckpointIO
from tests.checkpoint.test_io import said_by
from tests.loop import pieces
from tests.loop.pieces import Slope, numbers
from tests.loop.test_resume import FLAGS, Cut, Net, data, facts, in_two, whole
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

quiet = partial(pieces.quiet, enable_checkpointing=None)
LIMIT = 20.0


class Gated(TorchCheckpointIO):
    """Writes when it is let; notes what it did."""

    def __init__(self, is_open: bool = False) -> None:
        self.gate, self.begun, self.done = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]
        if is_open:
            self.gate.set()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.begun.set()
        assert self.gate.wait(LIMIT), "was never let"
        super().save_checkpoint(checkpoint, path, storage_options)
        self.done.append(f"save {os.path.basename(path)}")

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        self.done.append(f"remove {os.path.basename(path)}")


class Breaks(Gated):
    """Cannot write files of some names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.gate.wait(LIMIT)
        if os.path.basename(path) in self.names:
            raise OSError(f"no room for {os.path.basename(path)}")
        super().save_checkpoint(checkpoint, path, storage_options)


def content(number: float) -> dict[str, Any]:
    return {"state_dict": {"w": torch.tensor(number)}}


def number_in(path: Path) -> float:
    return float(format.load(path)["state_dict"]["w"])


# -- by itself -------------------------------------------------------------------------------------------------


def test_what_is_written_is_the_state_of_the_call(tmp_path: Path) -> None:
    inner = Gated()
    io, checkpoint = AsyncCheckpointIO(inner), content(1.0)
    io.save_checkpoint(checkpoint, tmp_path / "x")
    checkpoint["state_dict"]["w"].fill_(2.0)
    checkpoint["later"] = 1
    assert inner.done == []
    inner.gate.set()
    io.teardown()
    assert number_in(tmp_path / "x") == 1.0
    assert "later" not in format.load(tmp_path / "x")


def test_one_after_the_other_in_the_order_asked_for(tmp_path: Path) -> None:
    inner = Gated()
    io = AsyncCheckpointIO(inner)
    io.save_checkpoint(content(1.0), tmp_path / "a")
    io.save_checkpoint(content(2.0), tmp_path / "a")
    io.remove_checkpoint(tmp_path / "b")
    threading.Timer(0.2, inner.gate.set).start()
    io.save_checkpoint(content(3.0), tmp_path / "b")  # the third waits for the first
    assert inner.gate.is_set()
    assert inner.done[0] == "save a"
    io.remove_checkpoint(tmp_path / "a")
    io.teardown()
    assert inner.done == ["save a", "save a", "remove b", "save b", "remove a"]
    assert os.listdir(tmp_path) == ["b"]


def test_a_load_waits_for_the_file(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(inner := Gated())
    io.save_checkpoint(content(1.0), tmp_path / "x")
    threading.Timer(0.1, inner.gate.set).start()
    assert io.load_checkpoint(tmp_path / "x", weights_only=True)["state_dict"]["w"] == 1


@pytest.mark.parametrize("ask", ["save_checkpoint", "load_checkpoint", "teardown"])
def test_what_could_not_be_written_is_raised_once(ask: str, tmp_path: Path) -> None:
    inner = Breaks("x")
    io = AsyncCheckpointIO(inner)
    io.save_checkpoint(content(1.0), tmp_path / "x")
    io.remove_checkpoint(tmp_path / "old")
    inner.gate.set()
    arguments: dict[str, tuple[Any, ...]] = {
        "save_checkpoint": (content(2.0), tmp_path / "y"),
        "load_checkpoint": (tmp_path / "old",),
    }
    (tmp_path / "old").touch()
    io._wait()
    with pytest.raises(OSError, match="no room for x") as raised:
        getattr(io, ask)(*arguments.get(ask, ()))
    if sys.version_info >= (3, 11):
        assert "AsyncCheckpointIO failed to write" in raised.value.__notes__[0]
        assert str(tmp_path / "x") in raised.value.__notes__[0]
    io.teardown()
    assert os.listdir(tmp_path) == ["old"]  # what was to be removed in favour of x is kept


def test_what_a_failed_checkpoint_displaces_is_kept_though_the_next_is_there(tmp_path: Path) -> None:
    """The error was told, and taken away, before the thread came to the removals behind it."""
    inner = Breaks("x")
    io = AsyncCheckpointIO(inner)
    for name in ("old", "older"):
        (tmp_path / name).touch()
    io.save_checkpoint(content(1.0), tmp_path / "x")
    io.remove_checkpoint(tmp_path / "old")
    io.save_checkpoint(content(2.0), tmp_path / "y")
    io.remove_checkpoint(tmp_path / "older")
    threading.Timer(0.1, inner.gate.set).start()
    with pytest.raises(OSError, match="no room for x"):
        io.save_checkpoint(content(3.0), tmp_path / "z")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["old", "older", "y"]


KILLED = """
import os, signal, sys, torch
from lockstep.checkpoint import storage
from lockstep.checkpoint.io import AsyncCheckpointIO

def says_and_dies(file):
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

io, path = AsyncCheckpointIO(), sys.argv[1]
io.save_checkpoint({"state_dict": {"w": torch.tensor(1.0)}}, path)
io.teardown()
os.fsync = says_and_dies
io.save_checkpoint({"state_dict": {"w": torch.full((1000,), 2.0)}}, path)
io.remove_checkpoint(path + ".older")
io.teardown()
"""


def test_a_kill_in_the_middle_leaves_the_file_before_and_what_it_displaces(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "x.older").touch()
    (tmp_path / "script.py").write_text(KILLED)
    (killed,) = run_script(ranks, tmp_path / "script.py", str(tmp_path / "x"), folder=tmp_path)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "writing\n")
    assert number_in(tmp_path / "x") == 1.0
    assert (tmp_path / "x.older").exists()


# -- in a run --------------------------------------------------------------------------------------------------


class AtStep(Callback):
    """Does something at the end of a batch."""

    def __init__(self, batch_idx: int, action: Callable[[], Any]) -> None:
        self.batch_idx, self.action = batch_idx, action

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            self.action()


def test_what_is_displaced_goes_when_the_new_one_is_there(tmp_path: Path) -> None:
    inner, seen = Gated(is_open=True), []

    def look() -> None:
        assert inner.begun.wait(LIMIT)
        seen.append(sorted(os.listdir(tmp_path)))
        inner.gate.set()

    def shut() -> None:
        trainer.strategy.checkpoint_io._wait()  # type: ignore[attr-defined]
        inner.begun.clear()
        inner.gate.clear()

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last="link")
    callbacks = [AtStep(1, shut), AtStep(2, look), keep]
    trainer = quiet(plugins=[AsyncCheckpointIO(inner)], max_epochs=1, callbacks=callbacks)
    trainer.fit(Slope(), numbers(3))
    assert [name for name in seen[0] if not name.endswith(".part")] == ["last.ckpt", "step=1.ckpt"]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=3.ckpt"


def test_an_error_of_the_last_file_is_an_error_of_the_fit(tmp_path: Path) -> None:
    inner = Breaks("epoch=0-step=1.ckpt")
    inner.gate.set()
    trainer = quiet(plugins=AsyncCheckpointIO(inner), max_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.raises(OSError, match="no room for epoch=0"):
        trainer.fit(Slope(), numbers(1))
    assert trainer.state.status == "interrupted"


def test_a_failed_run_writes_what_it_has_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = Breaks("step=1.ckpt")
    inner.gate.set()

    def fail() -> None:
        raise ValueError("bad batch")

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [AtStep(1, fail), keep, OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(ValueError, match="bad batch"):
        quiet(plugins=AsyncCheckpointIO(inner), max_epochs=1, callbacks=callbacks).fit(Slope(lr=1.0), numbers(2))
    assert "A checkpoint could not be written: OSError: no room for step=1.ckpt" in caplog.text
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]
    assert number_in(tmp_path / "on_exception.ckpt") == -3


def test_workers_are_forked_while_a_file_is_written(tmp_path: Path) -> None:
    """A worker has the open file too, and must leave it alone."""
    inner = Halfway()
    io, checkpoint = AsyncCheckpointIO(inner), {"state_dict": {"w": torch.arange(100_000)}}
    io.save_checkpoint(checkpoint, tmp_path / "x")
    assert inner.begun.wait(LIMIT)
    assert len(list(DataLoader(range(4), num_workers=2))) == 4  # type: ignore[arg-type]
    inner.gate.set()
    io.teardown()
    assert torch.equal(format.load(tmp_path / "x")["state_dict"]["w"], torch.arange(100_000))


class Halfway(Gated):
    """Stops where some of the file is written and some is in Python's buffer."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        seal = format._HashingWriter.seal

        def wait_and_seal(writer: Any) -> None:
            self.begun.set()
            assert self.gate.wait(LIMIT)
            seal(writer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(format._HashingWriter, "seal", wait_and_seal)
            TorchCheckpointIO.save_checkpoint(self, checkpoint, path, storage_options)


# -- the same bits ---------------------------------------------------------------------------------------------


def flags() -> dict[str, Any]:
    return {**FLAGS, "plugins": [AsyncCheckpointIO()]}


@pytest.mark.parametrize(
    ("hook", "nth"), [("on_train_batch_end", 2), ("on_train_batch_end", 4), ("on_validation_end", 2)]
)
def test_a_fit_and_its_resume_are_the_same_bits(hook: str, nth: int, tmp_path: Path) -> None:
    assert in_two(Net, flags(), Cut(hook, nth, tmp_path / "cut.ckpt")) == whole(Net, FLAGS)


def test_a_resume_from_a_file_that_training_has_overtaken(tmp_path: Path) -> None:
    """Every step is saved and the files are written late; the run goes on from each to the same end."""
    expected = whole(Net, FLAGS)
    torch.manual_seed(1)
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = pieces.quiet(**flags(), enable_checkpointing=None, callbacks=[keep])
    run.fit(Net(), *data())
    names = sorted(os.listdir(tmp_path))
    assert len(names) > 3
    for name in names[:3]:
        module, trainer = Net(), pieces.quiet(**flags())
        found = facts(module, trainer, trainer.fit(module, *data(), ckpt_path=tmp_path / name))
        assert found == {key: value for key, value in expected.items() if key != "history"}


def on_two(path: Path) -> tuple[Any, Any]:
    expected = whole(Net, FLAGS, start=pieces.on_ranks)
    return expected, in_two(Net, flags(), Cut("on_train_batch_end", 2, path), start=pieces.on_ranks)


def test_a_fit_and_its_resume_on_ranks_are_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    for expected, found in ranks(2).run(on_two, tmp_path / "cut.ckpt", timeout=40):
        assert found == expected


def failing_on_ranks(folder: Path) -> str:
    inner = Breaks("epoch=0-step=2.ckpt")
    inner.gate.set()
    return said_by(AsyncCheckpointIO(inner), folder)


def test_an_error_of_rank_0_is_one_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    said = "OSError: no room for epoch=0-step=2.ckpt, interrupted"
    found = ranks(2).run(failing_on_ranks, tmp_path, timeout=40)
    assert found == [said, f"RankFailed: rank 0 could not write a checkpoint: {said}"]
