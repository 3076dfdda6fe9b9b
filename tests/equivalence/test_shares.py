"""Ranks that take unequal shares of each global batch train the model that one process trains."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from lockstep.strategies import DDPStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Plain, Weighted, rows
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


def with_shares(shares: tuple[float, ...], make: Any, length: int, given: dict[str, Any]) -> EquivalenceReport:
    """The report of ranks whose training feeds are cut by weight; that of one process takes no notice."""
    with patch.object(DDPStrategy, "shares", shares):
        return check_equivalence(make, rows(length), devices=len(shares), **given)


@pytest.mark.everyday
@pytest.mark.parametrize("make", [Plain, Weighted])
@pytest.mark.parametrize(
    ("length", "given"), [(72, {}), (67, {"accumulate": 2}), (67, {"strategy": "ddp"}), (65, {"accumulate": 3})]
)
def test_unequal_shares_train_the_model_of_one_process(
    ranks: RankPool, make: Any, length: int, given: dict[str, Any]
) -> None:
    report = ranks(2).run(with_shares, (3, 1), make, length, given, group=False)[0]
    assert report, report


def test_the_harness_sees_the_shares(ranks: RankPool) -> None:
    """Else the test above would prove nothing: a rank that is given no part is refused."""
    with pytest.raises(Exception, match=r"shares=\(99, 1\): replica 1 gets no sample"):
        ranks(2).run(with_shares, (99, 1), Plain, 72, {}, group=False)
