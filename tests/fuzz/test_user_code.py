"""Random user programs show on several ranks what they show on one process, or are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fuzz import engines
from tests.fuzz.compare import Verdict, compare, differences
from tests.fuzz.program import LATE, Event, Shown, draw
from tests.tools.pool import RankPool

EVERY_DAY = 3
ALL = 500


def failures(pool: RankPool, seeds: range) -> list[Verdict]:
    verdicts = [compare(pool, draw(seed)) for seed in seeds]
    assert sum(verdict.outcome == "equal" for verdict in verdicts) >= len(verdicts) / 2, verdicts
    return [verdict for verdict in verdicts if verdict.outcome == "different"]


def test_user_programs_are_the_same_on_ranks(ranks: RankPool) -> None:
    assert not failures(ranks(3).pool, range(EVERY_DAY))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(EVERY_DAY, ALL, 28))
def test_many_user_programs_are_the_same_on_ranks(ranks: RankPool, first: int) -> None:
    assert not failures(ranks(3).pool, range(first, min(first + 28, ALL)))


def unlike_on_engines(pool: RankPool, seeds: range) -> list[Verdict]:
    verdicts = [engines.compare(pool, engines.draw(seed)) for seed in seeds]
    return [verdict for verdict in verdicts if verdict.outcome == "different"]


def test_programs_are_the_same_on_engines(ranks: RankPool) -> None:
    assert not unlike_on_engines(ranks(2).pool, range(100, 102))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(102, 202, 25))
def test_many_programs_are_the_same_on_engines(ranks: RankPool, first: int) -> None:
    assert not unlike_on_engines(ranks(2).pool, range(first, first + 25))


PLAIN = replace(
    draw(0),
    world=2,
    samples=12,
    batch_size=2,
    accumulate=1,
    epochs=2,
    loader="shuffled",
    engine="in shared memory",
    optimizer="sgd",
    schedule="none",
    clip=None,
    manual=False,
    loss="mean",
    traits=frozenset(),
    events=(),
    validation=0,
)
FOUND = {
    "a step's value held that of an earlier micro-batch where a rank had no samples of the last one": replace(
        PLAIN, world=3, samples=14, batch_size=4, accumulate=2, loader="iterable"
    ),
    "a parameter that was frozen between forward and backward got a gradient of zeros, or raised": replace(
        PLAIN, accumulate=2, events=(Event("freeze", "on_before_zero_grad", 1, True),)
    ),
    "the same in a micro-batch that reduces": replace(PLAIN, events=(Event("freeze", "on_before_zero_grad", 1, True),)),
    "ranks without samples showed logged values in float32": replace(PLAIN, world=3, validation=1),
    "a training step on a padding batch was counted in an object of the user's": replace(
        PLAIN, world=3, samples=13, batch_size=1, manual=True
    ),
}


@pytest.mark.parametrize("fault", FOUND)
def test_what_programs_found_stays_mended(ranks: RankPool, fault: str) -> None:
    verdict = compare(ranks(3).pool, FOUND[fault])
    assert verdict.outcome == "equal", verdict


REFUSED = {
    "statistics of a part that a rank lacks": (
        replace(PLAIN, samples=8, batch_size=1, world=3, loader="two uneven loaders", traits=frozenset({"norm"})),
        "rank 2 has no samples from loader 0",
    ),
    **{
        kind: (replace(PLAIN, events=(Event(kind, hook, 1, late),)), said)
        for (kind, said), hook, late in zip(
            LATE.items(),
            (
                "on_train_epoch_start",
                "on_train_batch_start",
                "on_before_zero_grad",
                "on_train_batch_end",
                "on_train_start",
            ),
            (True, False, True, False, True),
            strict=True,
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(ranks: RankPool, case: str) -> None:
    program, reason = REFUSED[case]
    verdict = compare(ranks(3).pool, program)
    assert verdict.outcome == "refused", verdict
    assert reason in verdict.reasons[0]


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
