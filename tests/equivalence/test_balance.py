"""A balanced run trains the model of one process, to 1e-12, while shares move from one rank to another and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.strategies import DDPStrategy
from lockstep.testing import EquivalenceReport, RankPool, check_equivalence
from tests.equivalence.models import Blocks, Plain, Weighted, rows
from tests.loop.balanced import Takes, made_up_clock, slow_rank

pytestmark = pytest.mark.timeout(60)


class ByHand(Plain):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.losses(batch[0]).mean())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def balanced(make: Any, length: int, given: dict[str, Any]) -> tuple[EquivalenceReport, dict[int, int]]:
    """The report of a run in which first rank 0 is slow and then the next one, and how many samples each step had
    here."""
    with made_up_clock() as clock:
        takes = Takes(clock, slow_rank(0, until=16))
        settings = {"strategy": "ddp", "batch_size": 8, "steps": 36, "devices": 2, **given}
        report = check_equivalence(make, rows(length), callbacks=[takes], balance=True, **settings)
    return report, takes.parts


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (Plain, {}),
    "a loss with a weight of its own": (Weighted, {"accumulate": 2}),
    "accumulation, clipping": (Plain, {"accumulate": 3, "gradient_clip_val": 0.5}),
    "sharded optimizer": (Plain, {"strategy": lambda: DDPStrategy(shard_optimizer=True)}),
    "fsdp": (Blocks, {"strategy": "fsdp"}),
    "manual optimization": (ByHand, {}),
}


@pytest.mark.parametrize("case", CASES)
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
