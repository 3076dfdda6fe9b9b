"""A model in stages: the numbers of one process, whole checkpoints, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lockstep import LightningModule
from lockstep.strategies import BalancedStrategy
from lockstep.testing import EquivalenceReport, RankPool, check_equivalence
from tests.equivalence.models import Blocks, Idle, Plain, Sometimes, Weighted, rows

CASES: dict[str, tuple[type[LightningModule], int, dict[str, Any]]] = {
    "even": (Plain, 72, {}),
    "uneven last batch": (Plain, 23, {}),
    "empty shares": (Plain, 25, {"batch_size": 2, "steps": 7}),
    "accumulation 3, clipped": (Plain, 23, {"accumulate": 3, "gradient_clip_val": 0.5}),
    "own weights": (Weighted, 23, {"accumulate": 3}),
    "outside the chain": (Blocks, 23, {}),
    "unused in some steps": (Sometimes, 23, {"batch_size": 2}),
    "never used": (Idle, 23, {"accumulate": 3}),
}


def equivalence(case: str, options: dict[str, Any]) -> EquivalenceReport:
    module, length, given = CASES[case]
    strategy = BalancedStrategy(**options)
    return check_equivalence(module, rows(length), strategy=strategy, devices=dist.get_world_size(), **given)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "options"), [(2, {}), (3, {"schedule": "gpipe"}), (4, {"stages": 2})])
def test_a_pipeline_trains_as_one_process(ranks: RankPool, case: str, world: int, options: dict[str, Any]) -> None:
    for report in ranks(world).run(equivalence, case, options, timeout=60):
        assert report, report
