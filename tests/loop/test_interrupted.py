"""A fit that a signal ends in any place, beside callbacks and schedulers that watch a metric, is saved and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep import Callback, callbacks
from lockstep.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lockstep.engines.ranks import RankedStrategy
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.loop.test_signals import TASK
from tests.scripts.in_rank import run_script
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool


class Watched(Slope):
    """Logs a training and a validation loss, and may have a scheduler that watches one of them."""

    def __init__(self, plateau: dict[str, Any] | None = None) -> None:
        super().__init__(lr=0.01)
        self.plateau = plateau
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.w * batch).mean() + 1 / (1 + self.global_step))

    def note(self) -> None:
        self.epochs.append({name: round(value.item(), 12) for name, value in self.trainer.callback_metrics.items()})

    def on_train_end(self) -> None:
        if self.trainer.interruption is None:
            self.note()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and self.trainer.fit_loop.progress.batch == 0:
            self.note()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if self.plateau is None:
            return optimizer
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.plateau}}


class Signal(Callback):
    """Sends this process a signal before the ``nth`` batch of a kind."""

    def __init__(self, where: str, nth: int, number: int, rank: int = 0) -> None:
        self.where, self.left, self.number, self.rank = where, nth, number, rank

    def _come(self, where: str, rank: int) -> None:
        if where == self.where and rank == self.rank:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._come("training", trainer.global_rank)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self._come("sanity check" if trainer.sanity_checking else "validation", trainer.global_rank)


def stopping(**options: Any) -> Callable[[], list[Callback]]:
    return lambda: [EarlyStopping("val_loss", patience=2, min_delta=10.0, **options)]


WATCHING: dict[str, tuple[dict[str, Any] | None, Callable[[], list[Callback]]]] = {
    "EarlyStopping": (None, stopping()),
    "EarlyStopping at validation": (None, stopping(check_on_train_epoch_end=False)),
    "EarlyStopping of the training loss": (None, lambda: [EarlyStopping("train_loss_epoch", patience=2, min_delta=99)]),
    "ReduceLROnPlateau": ({"monitor": "val_loss"}, list),
    "ReduceLROnPlateau by step": ({"monitor": "train_loss_step", "interval": "step"}, list),
}
if is_there("extras"):
    WATCHING |= {
        "WeightAveraging": (None, lambda: [callbacks.WeightAveraging(), *stopping()()]),
        "StochasticWeightAveraging": (None, lambda: [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
    }
SAVING: dict[str, Callable[[Path], Any]] = {
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder, save_last=True, filename="best"),
    "ModelCheckpoint by metric": lambda folder: ModelCheckpoint(folder, monitor="val_loss", save_last=True),
    "OnExceptionCheckpoint": lambda folder: OnExceptionCheckpoint(folder, "last"),
}
SIGNALS = [signal.SIGINT, signal.SIGTERM]
PLACES = [("training", 2), ("training", 4), ("training", 6), ("validation", 1), ("validation", 3)]


def fit(kind: str, callbacks: list[Any], trainer: Callable[..., Any] = quiet, **options: Any) -> tuple[Any, Any, Any]:
    """Trains four epochs of four batches; what it ended with."""
    plateau, watching = WATCHING[kind]
    module, watchers = Watched(plateau), watching()
    writes = any(isinstance(each, ModelCheckpoint | OnExceptionCheckpoint) for each in callbacks)
    made = trainer(max_epochs=4, callbacks=[*watchers, *callbacks], enable_checkpointing=writes)
    try:
        result = made.fit(module, numbers(8, 2, shuffle=True), numbers(4, 2), **options)
    except SystemExit as ended:
        result = ended.code
    states = [watcher.state_dict() for watcher in watchers if isinstance(watcher, EarlyStopping)]
    rates = [group["lr"] for group in made.optimizers[0].param_groups]
    return result, module.epochs, (module.w.item(), repr(states), rates, made.global_step)


@pytest.mark.everyday
@pytest.mark.parametrize("saved_by", SAVING)
@pytest.mark.parametrize("kind", WATCHING)
def test_an_interrupted_epoch_is_saved_and_resumes_with_the_same_metrics(
    kind: str, saved_by: str, tmp_path: Path
) -> None:
    """EarlyStopping raised for want of the metric of a validation to come, or counted that of the last one again; what
    the epoch had logged was forgotten, so that its mean was that of its second part."""
    torch.manual_seed(1)
    _, epochs, ended = fit(kind, [])
    for at, (place, nth) in enumerate(PLACES):
        for number in SIGNALS if kind == "EarlyStopping" else SIGNALS[at % 2 :][:1]:
            folder = tmp_path / f"{place}{nth}{number}"
            torch.manual_seed(1)
            result, before, _ = fit(kind, [Signal(place, nth, number), SAVING[saved_by](folder)])
            assert result == 143 if number == signal.SIGTERM else result.interrupted, (place, nth)
            assert (folder / "last.ckpt").exists(), (place, nth, number)
            _, after, resumed = fit(kind, [], ckpt_path=folder / "last.ckpt")
            assert resumed == ended, (place, nth, number)
            assert before + after == epochs, (place, nth, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", WATCHING)
def test_a_signal_in_the_sanity_check_ends_the_fit_in_order(kind: str, number: int) -> None:
    result, _, (_, _, _, steps) = fit(kind, [Signal("sanity check", 1, number)])
    assert steps == 0
    assert result == 143 if number == signal.SIGTERM else result.interrupted


def cut_on_ranks(kind: str, where: str, nth: int, number: int, folder: Path) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    _, epochs, whole = fit(kind, [], on_ranks)
    torch.manual_seed(1)
    folder = folder / f"{where}{nth}"
    _, before, _ = fit(kind, [Signal(where, nth, number, rank=1), SAVING["OnExceptionCheckpoint"](folder)], on_ranks)
    _, after, resumed = fit(kind, [], on_ranks, ckpt_path=folder / "last.ckpt")
    return resumed == whole, before + after == epochs, len(before)


WATCHED = [kind for kind in ("EarlyStopping", "ReduceLROnPlateau", "WeightAveraging") if kind in WATCHING]
MOMENTS = [("training", 1, 0), ("training", 3, 1), ("validation", 1, 1)]


@pytest.mark.everyday
@pytest.mark.parametrize("kind", WATCHED)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("where", "nth", "epochs"), MOMENTS)
def test_ranks_that_one_signal_interrupts_go_on_with_the_same_metrics(
    ranks: RankPool, kind: str, number: int, where: str, nth: int, epochs: int, tmp_path: Path
) -> None:
    """An epoch has two steps here."""
    for same, metrics, before in ranks(2).run(cut_on_ranks, kind, where, nth, number, tmp_path, timeout=60):
        assert (same, metrics) == (True, True)
        assert before <= epochs


SCRIPT = """
import os, signal, sys
from lockstep.callbacks import EarlyStopping
from tests.loop.pieces import numbers, quiet
from tests.loop.test_interrupted import Signal, Watched

module = Watched()
callbacks = [EarlyStopping("val_loss"), Signal("training", int(sys.argv[1]), signal.SIGUSR1)]
trainer = quiet(max_epochs=2, callbacks=callbacks, default_root_dir=os.getcwd())
trainer.fit(module, numbers(8, 2), numbers(4, 2))
print("fitted", trainer.global_step, module.w.item(), callbacks[0].state_dict())
"""


@pytest.mark.parametrize("refused", [False, True])
def test_a_slurm_job_that_requeues_itself_in_its_first_epoch(ranks: RankPool, refused: bool, tmp_path: Path) -> None:
    """With EarlyStopping: saved, ended by SLURM and gone on with, or refused and gone on at once."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "scontrol").write_text("#!/bin/sh\n" + ("exit 1\n" if refused else "kill -TERM $PPID; sleep 1\n"))
    (tmp_path / "scontrol").chmod(0o755)

    def run(at: int, **environ: str) -> Any:
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
        (done,) = run_script(ranks, tmp_path / "train.py", str(at), folder=tmp_path, environ=environ)
        return done

    whole, first = run(0), run(2, **TASK)
    if not refused:
        assert (first.returncode, first.stdout) == (-signal.SIGTERM, ""), first.stderr
        first = run(0, **TASK, SLURM_RESTART_COUNT="1")
    assert first.returncode == 0, first.stderr
    assert first.stdout == whole.stdout


def test_a_rank_alone_is_not_killed_by_ctrl_c_while_it_makes_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a notebook's kernel, which then was gone with all variables."""
    found: list[Any] = []

    def make(self: Any) -> None:
        found.append(signal.getsignal(signal.SIGINT))
        raise KeyError("far enough")

    monkeypatch.setattr(RankedStrategy, "_make_group", make)
    with pytest.raises(KeyError, match="far enough"):
        quiet(strategy="ddp", devices=1, max_epochs=1).fit(Slope(), numbers(2))
    assert callable(found[0])
