"""Random user programs show on several ranks what they show on one process, or are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.testing import RankPool
from tests.fuzz.compare import Verdict, compare, differences
from tests.fuzz.program import Shown, draw

EVERY_DAY = 24
ALL = 500


def failures(pool: RankPool, seeds: range) -> list[Verdict]:
    verdicts = [compare(pool, draw(seed)) for seed in seeds]
    assert sum(verdict.outcome == "equal" for verdict in verdicts) > len(verdicts) / 2, verdicts
    return [verdict for verdict in verdicts if verdict.outcome == "different"]


@pytest.mark.parametrize("first", range(0, EVERY_DAY, 6))
def test_user_programs_are_the_same_on_ranks(ranks: RankPool, first: int) -> None:
    assert not failures(ranks(3).pool, range(first, first + 6))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(EVERY_DAY, ALL, 28))
def test_many_user_programs_are_the_same_on_ranks(ranks: RankPool, first: int) -> None:
    assert not failures(ranks(3).pool, range(first, min(first + 28, ALL)))


def shown() -> Shown:
    made = Shown(metrics={"loss": 1.0, "nan": float("nan")}, rates=[0.1])
    made.seen["training_step, epoch 0"] = [0, 1, 2]
    made.parameters["w"] = torch.ones(2)
    return made


def test_a_comparison_finds_each_kind_of_difference() -> None:
    assert not differences(shown(), [shown()])
    twice, lost, drifted, other = shown(), shown(), shown(), shown()
    twice.seen["training_step, epoch 0"].append(1)
    lost.seen["training_step, epoch 0"].remove(2)
    drifted.parameters["w"] = torch.tensor([1.0, 1.0001])
    other.metrics = {"loss": 1.0, "nan": 2.0}
    assert "counted too often [1]" in differences(shown(), [twice])[0]
    assert "samples lost [2]" in differences(shown(), [lost])[0]
    assert "'w' is off by" in differences(shown(), [drifted])[0]
    assert "'nan' is 2.0, not nan" in differences(shown(), [other])[0]
    assert "the logger should get" in differences(shown(), [replace(shown(), rows=[(0, {"loss": 1.0})])])[0]
