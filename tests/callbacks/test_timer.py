"""Timer: what it measures, when it stops, and that all ranks stop together."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import lockstep.callbacks.timer as timer_file
from lockstep import Callback
from lockstep.callbacks import Timer
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.side_by_side import OURS, loader, model, theirs, trainer
from tests.loop.pieces import SaveAt, Slope, Validated, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Clock(Callback):
    """A clock that a training batch moves by a second, in place of the machine's."""

    def __init__(self, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(file, "time", SimpleNamespace(monotonic=lambda: self.now))

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1.0


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("01:02:03:04", 93784.0),
        (" 00:00:00:05 ", 5.0),
        (timedelta(minutes=2), 120.0),
        ({"hours": 1, "seconds": 1}, 3601.0),
        (None, None),
    ],
)
def test_the_forms_of_a_duration(duration: Any, seconds: float | None) -> None:
    timer = Timer(duration)
    assert timer.time_remaining() == seconds
    assert timer.time_elapsed() == 0.0
    assert timer.start_time() is None
    assert timer.end_time("test") is None


@pytest.mark.parametrize("duration", ["1:2:3:4", "12 hours", {"years": 1}, 12])
def test_a_duration_that_is_none(duration: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Timer\(duration="):
        Timer(duration)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_it_stops_where_lightnings_stops(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    found = []
    for kit in (OURS, theirs(monkeypatch)):
        file = timer_file if kit is OURS else importlib.import_module("lightning.pytorch.callbacks.timer")

        class Ticks(kit.Callback):  # type: ignore[name-defined,misc]
            now = 50.0

            def on_train_batch_start(self, *_: Any) -> None:
                self.now += 1.0

            def on_validation_batch_start(self, *_: Any) -> None:
                self.now += 10.0

        ticks = Ticks()
        monkeypatch.setattr(file, "time", SimpleNamespace(monotonic=lambda ticks=ticks: ticks.now))
        timer = kit.callbacks.Timer(duration=timedelta(seconds=40), interval=interval)
        run = trainer(kit, callbacks=[ticks, timer], max_epochs=9)
        run.fit(model(kit), loader(16, 4), loader(4, 4))
        state = timer.state_dict()["time_elapsed"]
        ends = [(timer.start_time(stage), timer.end_time(stage)) for stage in ("train", "validate", "test")]
        found.append((run.global_step, timer.time_elapsed(), timer.time_remaining(), state, ends))
    assert found[0] == found[1]
    assert found[0][0] == (13 if interval == "step" else 12)


def test_each_stage_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(timer_file, monkeypatch)

    class Tested(Validated):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            clock.now += 3.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            clock.now += 2.0

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            clock.now += 4.0

    timer = Timer()
    run, module = quiet(callbacks=[clock, timer], max_epochs=1, num_sanity_val_steps=0), Tested()
    run.fit(module, numbers(5), numbers(1))
    run.test(module, numbers(2))
    run.predict(module, numbers(3))
    assert [timer.time_elapsed(s) for s in ("train", "validate", "test", "predict")] == [7.0, 2.0, 6.0, 12.0]
    assert timer.start_time("train") == 100.0
    assert timer.end_time("train") == 107.0


def test_a_resumed_run_has_used_up_the_time_of_its_earlier_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "run.ckpt", Clock(timer_file, monkeypatch)
    quiet(callbacks=[clock, Timer(), SaveAt(2, path)], max_epochs=1).fit(Slope(), numbers(5))

    timer = Timer(timedelta(seconds=7))
    result = quiet(callbacks=[clock, timer], max_epochs=9).fit(Slope(), numbers(5), ckpt_path=path)
    assert result.global_step == 7
    assert result.stopped == "Timer: duration=7 s reached after 7.0 s"
    assert timer.time_elapsed() == 7.0

    spent = Timer(timedelta(seconds=3))
    result = quiet(callbacks=[clock, spent], max_epochs=9).fit(Slope(), numbers(5), ckpt_path=path)
    assert result.global_step == 3
    assert spent.time_remaining() == 0.0


def stop_by_one_clock(fast: int) -> Any:
    """The clock of rank ``fast`` moves, the other's stands still; a wish to stop is known at the next boundary."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(timer_file, patch)
        if dist.get_rank() != fast:
            patch.setattr(timer_file, "time", SimpleNamespace(monotonic=lambda: 0.0))
        result = on_ranks(callbacks=[clock, Timer(timedelta(seconds=3))], max_epochs=2).fit(Slope(), numbers(10))
    return result.global_step, result.stopped


@pytest.mark.parametrize(("fast", "steps"), [(0, 4), (1, 10)])
def test_the_clock_of_rank_0_stops_all_ranks(ranks: RankPool, fast: int, steps: int) -> None:
    found = ranks(2).run(stop_by_one_clock, fast, timeout=40)
    assert found[0] == found[1]
    assert found[0][0] == steps
