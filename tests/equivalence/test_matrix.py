"""N ranks x k micro-batches train the model that one process with the whole batch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import LightningModule
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Plain, Running, Sometimes, rows
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
# With micro-batches of 4: 72 samples divide for every case; 23 leave an uneven tail; of 13, one sample is left
# for three ranks, two of which borrow theirs.
LENGTHS = (72, 23, 13)


def in_ranks(ranks: RankPool, world: int, make: type[LightningModule], length: int, **given: Any) -> EquivalenceReport:
    """The report of ddp in the pool's ranks, which is the same on all of them."""

    def check() -> EquivalenceReport:
        return check_equivalence(make, rows(length), devices=world, **given)

    reports = ranks(world).run(check, group=False)
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.everyday
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_process(accumulate: int, clip: str, length: int) -> None:
    report = check_equivalence(Plain, rows(length), strategy="auto", devices=1, accumulate=accumulate, **CLIPPING[clip])
    assert report, report


@pytest.mark.everyday(5)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world", [2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_ddp(ranks: RankPool, world: int, accumulate: int, clip: str, length: int) -> None:
    report = in_ranks(ranks, world, Plain, length, accumulate=accumulate, **CLIPPING[clip])
    assert report, report


# A fit in spawned processes, every day: tests/launch/test_notebook.py.


ONE_RANK = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.parametrize("world", [ONE_RANK, 2, 3])
def test_a_layer_that_only_some_ranks_use(ranks: RankPool, world: int) -> None:
    """Where no rank uses it, its gradient is None as on one process: momentum and decay leave it alone."""
    for accumulate in (1, 3):
        report = in_ranks(ranks, world, Sometimes, 23, accumulate=accumulate, batch_size=2)
        assert report, report


@pytest.mark.parametrize("world", [2, 3])
def test_running_buffers_are_those_of_rank_0(ranks: RankPool, world: int) -> None:
    report = in_ranks(ranks, world, Running, 72)
    assert report, report


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_optimizer_that_asks_for_a_closure(ranks: RankPool, accumulate: int) -> None:
    report = in_ranks(ranks, 2, Lbfgs, 23, accumulate=accumulate, tolerance=1e-10)
    assert report, report
