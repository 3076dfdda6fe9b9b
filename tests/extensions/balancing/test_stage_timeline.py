"""The file of a pipeline's stages, and the schedules that a plan plays."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep.callbacks import StageTimeline
from lockstep.extensions.balancing.planner.timeline import actions_of, simulate
from lockstep.extensions.balancing.stage_timeline import COLUMNS
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import BalancedStrategy
from tests.equivalence.models import Plain, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def trained(path: Path, devices: int, **options: Any) -> list[bool]:
    """A fit of 10 steps with a timeline; whether its times are still listened to."""
    strategy = BalancedStrategy(micro_batches=3, **options)
    flags: dict[str, Any] = {"max_epochs": 1, "precision": "64-true", "callbacks": [StageTimeline(path)]}
    quiet(strategy=strategy, devices=devices, **flags).fit(Plain(), rows(60)(6))
    return [times.listener is not None for times in strategy.times.values()]


def check_file(path: Path, stages: int, parts: list[int]) -> None:
    """Every step has a row for each stage, and the last window one for each part of a micro-batch."""
    with open(path, newline="") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == COLUMNS
    assert all(float(row["seconds"]) > 0 for row in found)
    by_stage = [[row for row in found if row["stages"] == str(stage)] for stage in range(stages)]
    assert sum(map(len, by_stage)) == len(found)
    for mine, count in zip(by_stage, parts, strict=True):
        steps = [row["step"] for row in mine if row["part"] == "a micro-batch"]
        assert steps == [str(step) for step in range(10)]
        spans = [row for row in mine if row["part"] != "a micro-batch"]
        assert {row["step"] for row in spans} == {"9"}
        assert len(spans) == count
        ends = [float(row["begin"]) + float(row["seconds"]) for row in spans]
        assert all(end <= float(row["begin"]) for end, row in zip(ends, spans[1:], strict=False))  # one after another


def test_a_fit_of_a_pipeline_leaves_a_file(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "stages.csv"  # whose folder is made
    assert ranks(2).run(partial(trained, split=[4, 1]), path, 2, timeout=40) == [[False], [False]]
    check_file(path, 2, [9, 9])  # before the chain, blocks, backward; blocks, after it, backward
    text = path.read_text()
    assert "9,0,4 1,before the chain," in text
    assert "9,1,4 1,after the chain," in text


def test_another_strategy_has_no_stages(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, callbacks=[StageTimeline(tmp_path / "stages.csv")])
    with pytest.raises(MisconfigurationException, match='SingleDeviceStrategy has none: use strategy="balanced"'):
        trainer.fit(Plain(), DataLoader(rows(4)(2).dataset, 2))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (3, 2), (4, 9)])
def test_a_schedule_takes_as_long_as_the_books_say(schedule: str, stages: int, micro_batches: int) -> None:
    bars = simulate([3.0] * stages, actions_of(schedule, stages, micro_batches))
    assert max(bar.end for bar in bars) == pytest.approx(3.0 * (micro_batches + stages - 1))  # as the books say


def test_the_slowest_stage_sets_the_pace() -> None:
    bars = simulate([3.0, 6.0], actions_of("1f1b", 2, 4))
    assert max(bar.end for bar in bars) == pytest.approx(1.0 + 4 * 6.0 + 2.0)


@pytest.mark.parametrize(("schedule", "each", "waits"), [("interleaved", 2, 1.5), ("zero-bubble", 1, 1.0)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_schedule_waits_as_its_paper_says(schedule: str, each: int, waits: float, ranks: int) -> None:
    """Narayanan et al. 2021, 2.2.2: a part of 1F1B's bubble; Qi et al. 2023, table 1, ZB-H1: a third of it."""
    actions = actions_of(schedule, ranks, 4 * ranks, each)
    whole = max(bar.end for bar in simulate([3.0 / each] * (ranks * each), actions))
    assert whole - 3.0 * 4 * ranks == pytest.approx(waits * (ranks - 1))
