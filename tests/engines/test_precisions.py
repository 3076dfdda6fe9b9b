"""Every strategy with every precision trains as one process does; a loss scale is one decision of all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lockstep.ground.extensions import is_there
from lockstep.strategies import FSDPStrategy
from tests.engines.precisions import NEAR, PAGE, PAIRS, STRATEGIES, Blocks, change, page
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


@cache
def alone(precision: str) -> Tensor:
    return change("one device", precision)


EVERYDAY = ("one device", "`ddp`", "`fsdp`")


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [pytest.param(*pair, marks=() if pair[0] in EVERYDAY else pytest.mark.slow) for pair in PAIRS],
)
def test_each_pair_trains_as_one_process(ranks: RankPool, strategy: str, precision: str) -> None:
    world = STRATEGIES[strategy][1]
    found = [change(strategy, precision)] if world == 1 else ranks(world).run(change, strategy, precision)
    for each in found:
        assert (each - alone(precision)).norm() <= NEAR[precision] * alone(precision).norm()
        assert alone(precision).norm() > 0.5


def gathered_in_bfloat16() -> Tensor:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return change("`fsdp`", "bf16-mixed", FSDPStrategy(mixed_precision=policy))


def test_parameters_travel_in_bfloat16_where_a_policy_says_so(ranks: RankPool) -> None:
    """Layer norms and embeddings are rounded then, which autocast does not do: so it is not what happens unasked."""
    (plain, *_), (rounded, *_) = (
        ranks(2).run(change, "`fsdp`", "bf16-mixed"),
        ranks(2).run(gathered_in_bfloat16),
    )
    whole = change("one device", "32-true")
    assert (plain - whole).norm() < (rounded - whole).norm() < 0.01 * whole.norm()


@pytest.mark.skipif(not is_there("parallel"), reason="the table has rows of the extension parallel")
def test_the_page_has_todays_table() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text()


class Overflows(Blocks):
    """On the last rank the gradients of one parameter are infinite in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return loss + self.table.weight.sum() * (torch.inf if last and batch_idx == 1 else 0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.get_scale()]

    def on_train_batch_end(self, *args: Any) -> None:
        whole = torch.cat([value.flatten().clone() for _, value, _ in self.trainer.strategy.whole_parameters()])
        self.seen = [*getattr(self, "seen", []), whole]


def overflow(strategy: str) -> Any:
    torch.manual_seed(3)
    module = Overflows()
    world = dist.get_world_size() if dist.is_initialized() else 1
    quiet(strategy=STRATEGIES[strategy][0](), devices=world, max_steps=3, precision="16-mixed").fit(module, rows(32)(4))
    return module.seen, module.scales


@pytest.mark.everyday(4)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "`dp`"])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(ranks: RankPool, strategy: str) -> None:
    world = STRATEGIES[strategy][1]
    found = [overflow(strategy)] if world == 1 else ranks(world).run(overflow, strategy)
    for seen, scales in found:
        assert torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]  # three steps in four batches
        assert all(torch.equal(one, other) for one, other in zip(seen, found[0][0], strict=True))
