"""The report of the equivalence harness: what strays first, in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.testing import check_equivalence
from lockstep.testing.equivalence import BUFFER, GRADIENT, PARAMETER, STEPS, RankFinding, Witness, digest, judge
from lockstep.utilities.exceptions import MisconfigurationException
from tests.equivalence.models import Plain, rows

pytestmark = pytest.mark.timeout(60)


def strays(*findings: tuple[int, str, str, float]) -> Witness:
    return Witness([RankFinding(step, what, name, size, 2.0, "same") for step, what, name, size in findings])


def test_nothing_strays() -> None:
    report = judge("ddp", 5, [Witness(largest=2e-16), Witness(largest=3e-16)])
    assert report
    assert str(report) == "ddp: 5 steps as on one process, to 3.0e-16"


def test_the_first_step_comes_first_and_the_largest_difference_in_it() -> None:
    both = strays(
        (3, GRADIENT, "late", 9.0), (2, PARAMETER, "w", 8.0), (2, GRADIENT, "w", 0.5), (2, GRADIENT, "v", 1.0)
    )
    report = judge("ddp", 5, [both, both])
    assert [(d.step, d.what, d.name) for d in report.first] == [(2, GRADIENT, "v"), (2, GRADIENT, "w")]
    assert [d.step for d in report.differences] == [2, 2, 2, 3]
    assert "step 2: gradient 'v' on ranks 0, 1 off by 1 (largest: 2)" in str(report)


def test_ranks_and_their_largest_difference() -> None:
    report = judge("ddp", 5, [strays(), strays((0, GRADIENT, "w", 0.5)), strays((0, GRADIENT, "w", 0.7))])
    (difference,) = report.differences
    assert (difference.ranks, difference.size) == ((1, 2), 0.7)
    assert "not reduced" in report.cause


def test_many_differences_are_counted() -> None:
    report = judge("ddp", 5, [strays(*((0, GRADIENT, f"w{i}", 1.0) for i in range(20)))])
    assert "and 12 more of this step" in str(report)


def test_another_course_of_steps_comes_before_all_that_follows() -> None:
    report = judge("ddp", 5, [strays((1, STEPS, "", math.inf), (1, GRADIENT, "w", 1.0))])
    assert "step 1: a different course of steps on rank 0" in str(report)
    assert report.cause.startswith("the runs make different steps")


@pytest.mark.parametrize(("at_first", "fresh"), [(True, True), (False, False)])
def test_buffers_need_to_meet_once_a_window(at_first: bool, fresh: bool) -> None:
    ranks = [Witness(), Witness()]
    for rank, witness in enumerate(ranks):
        for micro_batch in range(2):
            meets = at_first and micro_batch == 0
            witness.forward(0, 4.0, [("mean", torch.full((3,), 0.0 if meets else rank + 1.0))])
    report = judge("ddp", 1, ranks)
    assert bool(report) is fresh
    if not fresh:
        (difference,) = report.differences
        assert (difference.what, difference.name, difference.ranks, difference.size) == (BUFFER, "mean", (1,), 1.0)


def test_a_digest_tells_bits_apart() -> None:
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.ones(2, 3).t()) == digest(torch.ones(3, 2))


class Impatient(Plain):
    """Steps by hand, and once more where a batch is small."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2 if len(batch[0]) < 8 else 1):
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch[0]).mean())
            optimizer.step()


def test_runs_that_make_different_steps(ranks: Any) -> None:
    report = ranks(2).run(lambda: check_equivalence(Impatient, rows(72), devices=2), group=False)[0]
    assert report.first[0].what == STEPS
    assert report.first[0].ranks == (0, 1)


class Broken(Plain):
    def losses(self, x: torch.Tensor) -> torch.Tensor:
        losses = super().losses(x)
        return losses * (math.nan if self.global_step == 2 and len(x) < 8 else 1.0)


def test_nan_strays(ranks: Any) -> None:
    report = ranks(2).run(lambda: check_equivalence(Broken, rows(72), devices=2), group=False)[0]
    assert report.first[0].step == 2
    assert math.isnan(report.first[0].size)


def test_the_caller_keeps_its_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert check_equivalence(Plain, rows(23), strategy="auto", devices=1, steps=2)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_without_a_step_is_no_pass() -> None:
    """It was called equal, with the steps that were asked for."""
    with pytest.raises(MisconfigurationException, match="makes no optimizer step"):
        check_equivalence(Plain, rows(23), strategy="auto", devices=1, limit_train_batches=0)
