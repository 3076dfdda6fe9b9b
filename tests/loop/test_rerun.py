"""Fits of a run that `lockstep run` may start anew: what they save for it, and how they go on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Callback
from lockstep.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lockstep.checkpoint.io import AsyncCheckpointIO
from lockstep.launch import attempts
from lockstep.loop import signals
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.average import MovingAverage
from tests.tools.pool import RankPool

RUN = {"LOCKSTEP_RUN": "train-1", "LOCKSTEP_AGENT": "a"}
OWN = "lockstep-run-train-1-a-fit-1.ckpt"


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it makes of this process one in which no fit has been yet, of a run that may be started anew."""

    def begin() -> None:
        attempts._entered.clear()
        monkeypatch.setattr(signals, "_fits", itertools.count(1))

    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    begin()
    yield begin
    attempts._entered.clear()


class Die(Callback):
    """Ends a fit by an exception in one batch, and counts the batches."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.batches = at, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.batches == self.at:
            raise ZeroDivisionError
        self.batches += 1


class Noisy(Slope):
    """Draws a number in each step, and logs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        drawn = torch.rand(())
        self.log("drawn", drawn)
        return super().training_step(batch, batch_idx) * drawn


def checkpoints(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.ckpt")}


def test_a_run_that_nobody_saves_is_saved_at_the_end_of_each_epoch(tmp_path: Path, life: Callable[[], None]) -> None:
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=3, callbacks=[Die(9)], default_root_dir=tmp_path).fit(Noisy(0.1), numbers(4))
    assert checkpoints(tmp_path) == {OWN}
    life()
    counted, resumed = Die(), Noisy(0.1)
    result = quiet(max_epochs=3, callbacks=[counted], default_root_dir=tmp_path).fit(resumed, numbers(4))
    assert (counted.batches, result.epochs, result.global_step) == (4, 3, 12)


def test_where_a_callback_saves_only_the_end_is_saved_besides(tmp_path: Path, life: Callable[[], None]) -> None:
    keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3)
    flags: dict[str, Any] = {"max_epochs": 3, "default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.raises(ZeroDivisionError):
        quiet(callbacks=[Die(11), keep], **flags).fit(Slope(0.1), numbers(4))
    assert checkpoints(tmp_path) == {"kept/epoch=2-step=9.ckpt"}
    life()
    counted = Die()
    quiet(callbacks=[counted, ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3)], **flags).fit(
        Slope(0.1), numbers(4)
    )
    assert counted.batches == 3
    assert checkpoints(tmp_path) == {"kept/epoch=2-step=12.ckpt", OWN}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [(OnExceptionCheckpoint, {}), (ModelCheckpoint, {"save_weights_only": True}), (ModelCheckpoint, {"save_top_k": 0})],
)
def test_a_callback_from_whose_files_no_fit_goes_on_does_not_count(
    kind: type[Callback], flags: dict[str, Any], tmp_path: Path, life: Callable[[], None]
) -> None:
    callbacks = [kind(tmp_path / "kept", **flags), Die(5)]  # type: ignore[call-arg]
    trainer = quiet(max_epochs=3, callbacks=callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Slope(0.1), numbers(4))
    assert OWN in checkpoints(tmp_path)


def test_in_a_long_epoch_it_is_saved_from_time_to_time(
    tmp_path: Path, life: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Die):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.005)

    torch.manual_seed(3)
    whole = Noisy(0.1)
    quiet(max_epochs=1, default_root_dir=tmp_path / "whole").fit(whole, numbers(60))
    life()
    monkeypatch.setattr(signals, "OFTEN", 0.02)
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=[Slow(50)], default_root_dir=tmp_path).fit(Noisy(0.1), numbers(60))
    life()
    counted, resumed = Die(), Noisy(0.1)
    quiet(max_epochs=1, callbacks=[counted], default_root_dir=tmp_path).fit(resumed, numbers(60))
    assert 10 <= counted.batches < 60
    assert resumed.w.item() == whole.w.item()


def saved_in_time(folder: Path) -> tuple[int, list[str], float]:
    signals.OFTEN = 0.05
    attempts._entered.clear()
    signals._fits = itertools.count(1)
    os.environ.update(RUN)
    seen: list[str] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)
            seen.extend(checkpoints(folder) - set(seen))

    module = Slope(0.01)
    try:
        result = on_ranks(max_epochs=1, callbacks=[Look()], default_root_dir=folder).fit(module, numbers(60))
    finally:
        signals.OFTEN = 600.0
        attempts._entered.clear()
        for name in RUN:
            del os.environ[name]
    return result.global_step, seen, round(module.w.item(), 9)


def test_two_ranks_save_at_the_same_step_when_the_clock_of_rank_0_says_so(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(saved_in_time, tmp_path, timeout=60)
    assert first == second == (30, [OWN], -0.01 * sum(range(1, 61)) / 2)


def test_a_fit_that_has_ended_is_not_run_again(tmp_path: Path, life: Callable[[], None]) -> None:
    """The second one begins with the weights, the counters and the random numbers with which the first has ended."""

    def script(at: int) -> tuple[Any, ...]:
        torch.manual_seed(5)
        module, first, second = Noisy(0.1), Die(), Die(at)
        trainer = quiet(max_epochs=2, callbacks=[first, MovingAverage(0.5)], default_root_dir=tmp_path)
        result = trainer.fit(module, numbers(4))
        after = result, dict(trainer.callback_metrics), module.w.item(), trainer.global_step, torch.rand(2).tolist()
        trainer.fit_loop.max_epochs = 3
        again = trainer.fit(module, numbers(4))
        other = quiet(max_epochs=2, callbacks=[second], default_root_dir=tmp_path).fit(module, numbers(4))
        return first.batches, second.batches, after, again, other, module.w.item(), torch.rand(2).tolist()

    whole = script(-1)
    assert whole[:2] == (12, 8)
    for path in tmp_path.iterdir():
        path.unlink()
    life()
    with pytest.raises(ZeroDivisionError):
        script(5)
    life()
    resumed = script(-1)
    assert resumed[:2] == (0, 4)
    assert resumed[2:] == whole[2:]


def test_what_the_run_has_saved_goes_before_what_the_script_asks_for(tmp_path: Path, life: Callable[[], None]) -> None:
    other = tmp_path / "other.ckpt"
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Slope(0.1), numbers(2))
    trainer.save_checkpoint(other)
    for path in (*tmp_path.glob("*run*"), *tmp_path.glob(".lockstep*")):
        path.unlink(missing_ok=True)
    for at, batches in ((5, 5), (-1, 4)):  # the first life goes on from the script's, the second from its own
        life()
        counted = Die(at)
        trainer = quiet(max_epochs=5, callbacks=[counted], default_root_dir=tmp_path)
        with pytest.raises(ZeroDivisionError) if at == 5 else nullcontext():
            trainer.fit(Slope(0.1), numbers(2), ckpt_path=other)
        assert counted.batches == batches


def test_a_checkpoint_that_is_written_later_counts_when_it_is_there(tmp_path: Path, life: Callable[[], None]) -> None:
    io = AsyncCheckpointIO()
    seen: list[bool] = []

    def recorded(trainer: Any) -> list[str]:
        return list(trainer.session.signals.job.check().get("saved", {}).values())

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            for saved in recorded(trainer):  # it may make room for the next one as soon as that one is recorded
                seen.append(os.path.exists(saved) or saved not in recorded(trainer))

    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    quiet(
        max_epochs=1, callbacks=[Look(), keep], plugins=[io], enable_checkpointing=True, default_root_dir=tmp_path
    ).fit(Slope(0.1), numbers(20))
    assert seen
    assert all(seen)


@pytest.mark.parametrize("flags", [{"fast_dev_run": 2}, {}])
def test_elsewhere_nothing_is_written(flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if flags:
        for name, value in RUN.items():
            monkeypatch.setenv(name, value)
    quiet(**{"max_epochs": 2, **flags}, default_root_dir=tmp_path).fit(Slope(0.1), numbers(4))
    assert list(tmp_path.iterdir()) == []
