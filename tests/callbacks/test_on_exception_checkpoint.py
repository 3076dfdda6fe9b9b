"""OnExceptionCheckpoint: what is saved when a batch fails, on one process and on one of two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import Callback
from lockstep.callbacks import OnExceptionCheckpoint
from lockstep.checkpoint import format
from tests.loop.pieces import Slope, Validated, numbers, on_ranks, quiet
from tests.tools.fresh import python
from tests.tools.pool import RankPool

HERE = Path(__file__).resolve().parents[2]


def guarded(folder: Path, *others: Any, **flags: Any) -> Any:
    callbacks = [OnExceptionCheckpoint(folder), *others]
    return quiet(callbacks=callbacks, **{"enable_checkpointing": True, "max_epochs": 3, **flags})


class Failing(Slope):
    """Fails in one training step, once."""

    def __init__(self, epoch: int, batch: int, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.at: tuple[int, int] | None = (epoch, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.at == (self.current_epoch, batch_idx):
            self.at = None
            raise OSError("the disk is gone")
        return loss


@pytest.mark.everyday
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (0, 4), (1, 0), (1, 6), (2, 7)])
def test_the_run_goes_on_from_the_window_that_failed(epoch: int, batch: int, accumulate: int, tmp_path: Path) -> None:
    """Batch 7 is the epoch's last: a checkpoint that took it for done lost it."""
    whole, failing, resumed = Slope(lr=0.1), Failing(epoch, batch), Slope(lr=0.1)
    quiet(max_epochs=3, accumulate_grad_batches=accumulate).fit(whole, numbers(8))
    with pytest.raises(OSError, match="the disk is gone"):
        guarded(tmp_path, accumulate_grad_batches=accumulate).fit(failing, numbers(8))
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]

    result = guarded(tmp_path, accumulate_grad_batches=accumulate).fit(resumed, numbers(8), ckpt_path="last")
    assert failing.gradients + resumed.gradients == whole.gradients
    assert torch.equal(resumed.w, whole.w)
    assert result.global_step == len(whole.gradients)
    assert os.listdir(tmp_path) == []  # a fit that ends well needs it no more


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_failures_between_the_steps(hook: str, tmp_path: Path) -> None:
    class Fails(Callback):
        pass

    def fail(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            raise OSError("no more")

    setattr(Fails, hook, fail)
    whole, failing, resumed = Validated(lr=0.1), Validated(lr=0.1), Validated(lr=0.1)
    quiet(max_epochs=3).fit(whole, numbers(4), numbers(1))
    with pytest.raises(OSError, match="no more"):
        guarded(tmp_path, Fails()).fit(failing, numbers(4), numbers(1))
    guarded(tmp_path).fit(resumed, numbers(4), numbers(1), ckpt_path=tmp_path / "on_exception.ckpt")
    assert failing.gradients + resumed.gradients == whole.gradients
    assert torch.equal(resumed.w, whole.w)


def test_a_fit_that_fails_before_it_trains_leaves_an_earlier_checkpoint_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        guarded(tmp_path).fit(Failing(1, 2), numbers(4))
    before = (tmp_path / "on_exception.ckpt").read_bytes()

    class Early(Slope):
        def on_fit_start(self) -> None:
            raise OSError("wrong folder")

    with pytest.raises(OSError, match="wrong folder"):
        guarded(tmp_path).fit(Early(), numbers(4), ckpt_path="last")
    assert (tmp_path / "on_exception.ckpt").read_bytes() == before


def test_evaluation_neither_writes_nor_removes(tmp_path: Path) -> None:
    class Tested(Slope):
        fails = False

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.fails:
                raise OSError("no more")

    with pytest.raises(OSError, match="the disk is gone"):
        guarded(tmp_path).fit(Failing(1, 2), numbers(4))
    path = tmp_path / "on_exception.ckpt"
    before = path.read_bytes()
    run, module = guarded(tmp_path), Tested()
    run.validate(module, numbers(2), verbose=False)
    module.fails = True
    with pytest.raises(OSError, match="no more"):
        run.validate(module, numbers(2))
    assert path.read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_does_not_hide_the_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Removes(Failing):
        def on_train_start(self) -> None:
            (tmp_path / "folder").write_text("in the way")

    with pytest.raises(OSError, match="the disk is gone"), caplog.at_level("WARNING", logger="lockstep"):
        guarded(tmp_path / "folder").fit(Removes(0, 1), numbers(4))
    assert "OnExceptionCheckpoint could not write" in caplog.text


def test_ctrl_c_is_saved_whole(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.interruption, trainer.should_stop = "Ctrl-C", True

    result = guarded(tmp_path, Interrupt()).fit(Slope(), numbers(4))
    assert result.interrupted
    saved = format.load(tmp_path / "on_exception.ckpt", map_location="cpu")
    assert saved["global_step"] == 2
    assert "random" in saved["lockstep"]["ranks"][0]


SCRIPT = """
import sys
from lockstep import Trainer
from lockstep.callbacks import OnExceptionCheckpoint
from tests.loop.pieces import QUIET, Slope, numbers

class Fails(Slope):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and (self.current_epoch, batch_idx) == (1, 3):
            raise OSError("the disk of rank 1 is gone")
        return super().training_step(batch, batch_idx)

flags = {**QUIET, "enable_checkpointing": True, "callbacks": OnExceptionCheckpoint(sys.argv[1])}
trainer = Trainer(devices=2, strategy="ddp", max_epochs=3, accumulate_grad_batches=2, **flags)
trainer.fit(Fails(lr=0.1), numbers(12))
"""


def resumed(folder: str) -> Any:
    module = Slope(lr=0.1)
    flags: dict[str, Any] = {"callbacks": OnExceptionCheckpoint(folder), "enable_checkpointing": True}
    run = on_ranks(max_epochs=3, accumulate_grad_batches=2, **flags)
    run.fit(module, numbers(12), ckpt_path="last")
    return dist.get_rank(), run.global_step, module.w.item()


class TellsLate(Callback):
    """Rank 1 is told of a failure in the middle of a window, rank 0 two windows later."""

    def __init__(self, guard: OnExceptionCheckpoint) -> None:
        self.guard = guard
        self.written: list[bytes] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = Path(self.guard.ckpt_path)
        if (trainer.global_rank, batch_idx) in ((1, 2), (0, 5)):
            trainer.strategy.gather_objects = None  # whoever asks another rank fails
            self.guard.on_exception(trainer, module, OSError("gone"))
            del trainer.strategy.gather_objects
            self.written.append(path.read_bytes())


def told_late(folder: str) -> Any:
    guard = OnExceptionCheckpoint(folder)
    guard.teardown = lambda *_: None  # type: ignore[method-assign]
    tells = TellsLate(guard)
    run = on_ranks(max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=[guard, tells])
    run.fit(Slope(lr=0.1), numbers(12))
    return tells.written


def test_the_first_rank_that_fails_writes_and_asks_nobody(ranks: RankPool, tmp_path: Path) -> None:
    (later,), (first,) = ranks(2).run(told_late, str(tmp_path), timeout=40)
    assert later == first
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]
    saved = format.load(tmp_path / "on_exception.ckpt", map_location="cpu")
    assert (saved["global_step"], saved["lockstep"]["progress"]["batch"]) == (1, 2)


@pytest.mark.slow
def test_a_rank_that_fails_alone_saves_what_all_have_in_common(ranks: RankPool, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(SCRIPT)
    failed = python(script, folder, seconds=90, PYTHONPATH=str(HERE))
    assert failed.returncode != 0
    assert "the disk of rank 1 is gone" in failed.stderr.splitlines()[-1]
    assert os.listdir(folder) == ["on_exception.ckpt"]
    saved = format.load(folder / "on_exception.ckpt", map_location="cpu")
    assert saved["global_step"] == 3 + 1
    assert saved["lockstep"]["progress"]["batch"] == 2  # the window of batches 2 and 3 begins again

    whole = Slope(lr=0.1)
    quiet(max_epochs=3, accumulate_grad_batches=2).fit(whole, numbers(12, batch_size=2))
    for _, steps, w in ranks(2).run(resumed, str(folder), timeout=40):
        assert w == pytest.approx(whole.w.item(), rel=1e-12)
        assert steps == 9
    assert os.listdir(folder) == []
