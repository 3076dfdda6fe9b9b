"""A balanced run trains the model of one process, to 1e-12, while shares move from one rank to another and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep.strategies import DDPStrategy
from lockstep.testing import EquivalenceReport, ManualOptimBoringModel, RandomDataset, check_equivalence
from tests.equivalence.models import Blocks, Plain, Weighted, rows
from tests.extensions.balancing.balanced import Takes, made_up_clock, slow_rank
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


def noise(length: int) -> Callable[[int], Any]:
    return lambda batch_size: DataLoader(RandomDataset(32, length), batch_size, shuffle=True)


def balanced(make: Any, length: int, given: dict[str, Any]) -> tuple[EquivalenceReport, dict[int, int]]:
    """The report of a run in which first rank 0 is slow and then the next one, and how many samples each step had
    here."""
    with made_up_clock() as clock:
        takes = Takes(clock, slow_rank(0, until=16))
        settings = {"strategy": "ddp", "batch_size": 8, "steps": 36, "devices": 2, **given}
        data = noise(length) if make is ManualOptimBoringModel else rows(length)
        report = check_equivalence(make, data, callbacks=[takes], balance=True, **settings)
    return report, takes.parts


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (Plain, {}),
    "a loss with a weight of its own": (Weighted, {"accumulate": 2}),
    "accumulation, clipping": (Plain, {"accumulate": 3, "gradient_clip_val": 0.5}),
    "sharded optimizer": (Plain, {"strategy": lambda: DDPStrategy(shard_optimizer=True)}),
    "fsdp": (Plain, {"strategy": "fsdp"}),
    "fsdp, blocks": (Blocks, {"strategy": "fsdp"}),
    "manual optimization": (ManualOptimBoringModel, {}),
}


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "fsdp, blocks" else ()) for case in CASES]
)
def test_a_balanced_run_is_one_process(ranks: RankPool, case: str) -> None:
    make, given = CASES[case]
    if callable(given.get("strategy")):
        given = {**given, "strategy": given["strategy"]()}
    whole = 16 * given.get("accumulate", 1)
    found = ranks(2).run(balanced, make, 203, given, group=False)
    for report, _ in found:
        assert report, report
    first, second = (parts for _, parts in found)
    splits = dict.fromkeys((mine, second[step]) for step, mine in first.items() if mine + second[step] == whole)
    shares = [mine / whole for mine, _ in splits]
    assert len(shares) == 3, splits  # even, then less for the first rank, then for the second
    assert shares[1] < shares[0] == 0.5 < shares[2]
