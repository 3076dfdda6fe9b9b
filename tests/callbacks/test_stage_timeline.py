"""The picture of a pipeline's stages, and the schedule that a plan draws."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep.callbacks import StageTimeline
from lockstep.ground.errors import MisconfigurationException
from lockstep.planner.timeline import BACKWARD, FORWARD, play
from lockstep.strategies import BalancedStrategy
from lockstep.testing import RankPool
from tests.equivalence.models import Plain, rows
from tests.loop.pieces import quiet


def drawn(path: Path) -> dict[str, Any]:
    timeline = StageTimeline(path)
    strategy = BalancedStrategy(split=[4, 1], micro_batches=3)
    seen: dict[str, Any] = {}
    own = timeline._draw
    timeline._draw = lambda *given: (seen.update(given=given), own(*given))[1]  # type: ignore[method-assign]
    trainer = quiet(strategy=strategy, devices=2, max_epochs=1, precision="64-true", callbacks=[timeline])
    trainer.fit(Plain(), rows(60)(6))
    assert strategy.times is not None
    return {"given": seen.get("given"), "listens": strategy.times.listener is not None}


def test_a_fit_of_a_pipeline_leaves_a_picture(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "stages.png"  # whose folder is made
    first, second = ranks(2).run(drawn, path, timeout=40)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert second["given"] is None
    assert first["listens"] is second["listens"] is False
    stages, decisions, one_clock = first["given"]
    assert [[step for step, _ in seconds] for seconds, _ in stages] == [list(range(10))] * 2
    assert all(took > 0 for seconds, _ in stages for _, took in seconds)
    parts = [[span.part for span in shown[0].spans] for _, shown in stages]
    assert [len(each) for each in parts] == [9, 9]  # before the chain, blocks, backward; blocks, behind it, backward
    assert decisions == []
    assert one_clock


def test_another_strategy_has_no_stages(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, callbacks=[StageTimeline(tmp_path / "stages.png")])
    with pytest.raises(MisconfigurationException, match='SingleDeviceStrategy has none: use strategy="balanced"'):
        trainer.fit(Plain(), DataLoader(rows(4)(2).dataset, 2))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (3, 2), (4, 9)])
def test_a_schedule_is_played_without_overlaps_and_in_order(schedule: str, stages: int, micro_batches: int) -> None:
    bars = play([3.0] * stages, micro_batches, schedule)
    assert max(bar.end for bar in bars) == pytest.approx(3.0 * (micro_batches + stages - 1))  # as the books say
    for stage in range(stages):
        mine = [bar for bar in bars if bar.stage == stage]
        assert [bar.part for bar in mine].count(FORWARD) == [bar.part for bar in mine].count(BACKWARD) == micro_batches
        assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(mine))


def test_the_slowest_stage_sets_the_pace() -> None:
    bars = play([3.0, 6.0], 4, "1f1b")
    assert max(bar.end for bar in bars) == pytest.approx(1.0 + 4 * 6.0 + 2.0)
