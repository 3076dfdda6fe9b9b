"""The picture of a pipeline's stages, and the schedule that a plan draws."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep.callbacks import StageTimeline
from lockstep.ground.errors import MisconfigurationException
from lockstep.planner.timeline import BACKWARD, BETWEEN, FORWARD, Action, actions_of, held, play
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
    listens = [times.listener is not None for times in strategy.times.values()]
    return {"given": seen.get("given"), "listens": listens}


def test_a_fit_of_a_pipeline_leaves_a_picture(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "stages.png"  # whose folder is made
    first, second = ranks(2).run(drawn, path, timeout=40)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert second["given"] is None
    assert first["listens"] == second["listens"] == [False]
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
    bars = play([3.0] * stages, actions_of(schedule, stages, micro_batches))
    assert max(bar.end for bar in bars) == pytest.approx(3.0 * (micro_batches + stages - 1))  # as the books say
    for stage in range(stages):
        mine = [bar for bar in bars if bar.row == stage]
        assert [bar.part for bar in mine].count(FORWARD) == [bar.part for bar in mine].count(BACKWARD) == micro_batches
        assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(mine))


def test_the_slowest_stage_sets_the_pace() -> None:
    bars = play([3.0, 6.0], actions_of("1f1b", 2, 4))
    assert max(bar.end for bar in bars) == pytest.approx(1.0 + 4 * 6.0 + 2.0)


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (3, 6), (4, 8), (5, 35)])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_the_ranks_do_all_of_a_step_by_torchs_tables(schedule: str, ranks: int, micro_batches: int, each: int) -> None:
    actions = actions_of(schedule, ranks, micro_batches, each)
    letters = "FB" if schedule == "interleaved" else "FIW"
    for rank, mine in enumerate(actions):
        stages, numbers = range(rank, ranks * each, ranks), range(micro_batches)
        assert sorted(mine) == sorted(Action(*of_it) for of_it in itertools.product(stages, numbers, letters))
        each_most = micro_batches * (1 + BETWEEN if schedule == "zero-bubble" else 1)
        assert all(0 < most <= each_most for most in held(mine).values())
    seconds = 3.0 * micro_batches  # of each rank
    whole = max(bar.end for bar in play([3.0 / each] * (ranks * each), actions))
    in_turn = max(bar.end for bar in play([3.0] * ranks, actions_of("1f1b", ranks, micro_batches)))
    assert seconds < whole <= in_turn + 1e-9
    if schedule == "zero-bubble" or each > 1:
        assert whole < in_turn


@pytest.mark.parametrize(("schedule", "each", "waits"), [("interleaved", 2, 1.5), ("zero-bubble", 1, 1.0)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_schedule_waits_as_its_paper_says(schedule: str, each: int, waits: float, ranks: int) -> None:
    """Narayanan et al. 2021, 2.2.2: a part of 1F1B's bubble; Qi et al. 2023, table 1, ZB-H1: a third of it."""
    actions = actions_of(schedule, ranks, 4 * ranks, each)
    whole = max(bar.end for bar in play([3.0 / each] * (ranks * each), actions))
    assert whole - 3.0 * 4 * ranks == pytest.approx(waits * (ranks - 1))


def test_ranks_that_wait_for_one_another_are_said() -> None:
    with pytest.raises(ValueError, match="wait for one another"):
        play([1.0, 1.0], [[Action(0, 0, "B")], [Action(1, 0, "F"), Action(1, 0, "B")]])
