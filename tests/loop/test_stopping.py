"""How a fit ends, and that all ranks say the same of it."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from tests.loop.pieces import Slope, Validated, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Flat(Slope):
    """Its validation loss never falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", batch.mean(), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch.mean())


def run_flat(folder: Path, ranks: bool, **flags: Any) -> dict[str, Any]:
    callbacks = [EarlyStopping("val", patience=2), ModelCheckpoint(folder, monitor="val")]
    options = {"max_epochs": 9, "callbacks": callbacks, "enable_checkpointing": True, **flags}
    batch = 1 if ranks else 2
    trainer = (on_ranks if ranks else quiet)(**options)
    result = trainer.fit(Flat(), numbers(8, batch), numbers(4))
    return asdict(result)


def test_the_result_is_the_same_on_one_process_and_on_two(ranks: RankPool, tmp_path: Path) -> None:
    alone = run_flat(tmp_path / "a", False)
    first, second = ranks(2).run(run_flat, tmp_path / "b", True)
    assert alone["best_model_path"] == str(tmp_path / "a" / "epoch=0-step=4.ckpt")
    assert alone["stopped"].startswith("EarlyStopping: val did not improve in 2 checks")
    assert (alone["epochs"], alone["global_step"], alone["best_model_score"]) == (3, 12, 2.5)
    assert alone["metrics"] == {"train": 4.5, "train_step": 7.5, "train_epoch": 4.5, "val": 2.5}
    for other in (first, second):
        assert {**other, "best_model_path": other["best_model_path"].replace("/b/", "/a/")} == alone


def ends(flags: dict[str, Any]) -> tuple[dict[str, Any], int]:
    module = Slope()
    return asdict(on_ranks(**flags).fit(module, numbers(20))), len(module.batches)


@pytest.mark.parametrize(
    ("flags", "stopped"),
    [
        ({"max_epochs": 1}, "max_epochs=1 reached"),
        ({"max_steps": 3}, "max_steps=3 reached"),
        ({"max_time": "00:00:00:00"}, "max_time=0 s reached"),
    ],
)
def test_all_ranks_give_the_same_reason(ranks: RankPool, flags: dict[str, Any], stopped: str) -> None:
    """Rank 0's clock ends a fit, and the others did not know why."""
    first, second = ranks(2).run(ends, flags)
    assert first == second
    assert first[0]["stopped"] == stopped


def stop_one(rank: int, flags: dict[str, Any]) -> tuple[int, int, str, list[int]]:
    def stop(module: Any, batch: Any, at: int) -> None:
        module.trainer.should_stop |= (module.global_rank, at) == (rank, 2)

    module = acting(Validated, training_step=stop)
    result = on_ranks(max_epochs=2, num_sanity_val_steps=0, **flags).fit(module, numbers(20), numbers(2))
    return len(module.batches), result.global_step, result.stopped, module.validated


@pytest.mark.everyday(5)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("flags", "batches"),
    [({}, 3), ({"accumulate_grad_batches": 4}, 4), ({"min_steps": 6}, 10), ({"min_epochs": 1}, 10)],
)
def test_one_rank_stops_all_at_the_same_step(ranks: RankPool, rank: int, flags: dict[str, Any], batches: int) -> None:
    first, second = ranks(2).run(stop_one, rank, flags, timeout=30)
    assert first == second
    assert first[0] == batches
    assert first[2] == "trainer.should_stop was set"
    assert first[3] == [batches]


def test_who_stops_in_a_validation_stops_there(ranks: RankPool) -> None:
    assert ranks(2).run(stop_in_validation, timeout=30) == [4, 4]


def stop_in_validation() -> int:
    def stop(module: Any) -> None:
        module.trainer.should_stop = module.global_rank == 1

    module = acting(Validated, on_validation_end=stop)
    on_ranks(max_epochs=2, val_check_interval=4, num_sanity_val_steps=0).fit(module, numbers(20), numbers(2))
    return len(module.batches)


# -- Ctrl-C ------------------------------------------------------------------------------------------------


class CtrlC(Validated):
    """Sends SIGINT to its own process in a hook, as often as asked."""

    def __init__(self, hook: str = "training_step", times: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.hook, self.times, self.rank = hook, times, rank
        self.calls: list[str] = []

    def press(self, hook: str, batch_idx: int) -> None:
        if hook == self.hook and batch_idx == 1 and self.global_rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.press("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.press("validation_step", batch_idx)

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)

    def on_train_end(self) -> None:
        self.calls.append("on_train_end")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ctrl_c_ends_a_fit_at_the_next_boundary(accumulate: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    module = CtrlC()
    trainer = quiet(max_epochs=3, accumulate_grad_batches=accumulate, min_epochs=2)
    result = trainer.fit(module, numbers(9))
    assert (result.interrupted, result.stopped) == (True, "interrupted by Ctrl-C")
    assert result.global_step == (2 if accumulate == 1 else 1)
    assert module.calls == ["on_train_end", "KeyboardInterrupt"]
    assert (trainer.interrupted, signal.getsignal(signal.SIGINT)) == (True, before)
    said = capfd.readouterr().err
    assert "lockstep: Ctrl-C: trainer.fit ends at the next boundary; a second Ctrl-C ends it at once.\n" in said


def test_a_second_ctrl_c_raises() -> None:
    """It was taken for the first one, and the fit returned as if nothing had happened."""
    module = CtrlC(times=2)
    with pytest.raises(KeyboardInterrupt):
        quiet(max_epochs=3).fit(module, numbers(9))
    assert len(module.batches) == 1


def test_ctrl_c_in_a_validation_ends_the_fit() -> None:
    module = CtrlC("validation_step")
    result = quiet(max_epochs=3, num_sanity_val_steps=0).fit(module, numbers(2), numbers(9))
    assert (result.interrupted, len(module.batches)) == (True, 2)


def test_ctrl_c_ends_an_evaluation_in_order_and_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """It returned None, as if that were what the validation had measured."""
    module, trainer = CtrlC("validation_step"), quiet()
    with pytest.raises(KeyboardInterrupt):
        trainer.validate(module, numbers(9))
    assert (module.calls, trainer.interrupted) == (["KeyboardInterrupt"], True)
    said = capfd.readouterr().err
    assert said == "lockstep: Ctrl-C: trainer.validate ends at this batch's end; a second Ctrl-C ends it at once.\n"


def test_a_fit_after_an_interrupted_one_runs_to_its_end() -> None:
    trainer = quiet(max_epochs=2)
    assert trainer.fit(CtrlC(), numbers(9)).interrupted
    result = trainer.fit(Slope(), numbers(9))
    assert (result.interrupted, result.epochs) == (False, 2)


def press_on(rank: int, hook: str) -> tuple[int, bool, str]:
    module = CtrlC(hook, rank=rank)
    flags: dict[str, Any] = {"max_epochs": 3, "min_epochs": 2, "num_sanity_val_steps": 0}
    result = on_ranks(**flags).fit(module, numbers(6), numbers(6))
    return len(module.batches), result.interrupted, result.stopped


@pytest.mark.everyday
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("hook", "batches"), [("training_step", 2), ("validation_step", 3)])
def test_ctrl_c_on_one_rank_ends_all(ranks: RankPool, rank: int, hook: str, batches: int) -> None:
    """With `min_epochs` the others went on; in a validation the one left and the others waited for its metrics."""
    assert ranks(2).run(press_on, rank, hook, timeout=30) == [(batches, True, "interrupted by Ctrl-C")] * 2
