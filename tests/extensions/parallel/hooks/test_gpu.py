"""Hooks on GPU tensors: over NCCL with one rank, over gloo with two ranks that share a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.parallel import hooks
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from tests.extensions.parallel.hooks.pieces import Model, play, same_on_all
from tests.tools.pool import RankPool

pytestmark = pytest.mark.gpu
CUT = [[(40, 30), (7,)], [(16, 3, 5)]]
HOOKS: dict[str, Any] = {
    "allreduce": (hooks.allreduce, lambda: None),
    "fp16": (hooks.fp16, lambda: None),
    "bf16": (hooks.bf16, lambda: None),
    "power_sgd": (hooks.power_sgd, lambda: hooks.PowerSGDState(rank=3, start=1)),
    "fp16 of power_sgd": (hooks.fp16_wrapper(hooks.power_sgd), lambda: hooks.PowerSGDState(rank=3, start=1)),
}


def _on_card(buckets: list[GradBucket]) -> list[GradBucket]:
    moved = []
    for bucket in buckets:
        flat, views, start = bucket.buffer().cuda(), [], 0
        for gradient in bucket.gradients():
            views.append(flat[start : start + gradient.numel()].view(gradient.shape))
            start += gradient.numel()
        moved.append(GradBucket(bucket.index(), flat, views, bucket.parameters(), bucket.is_last()))
    return moved


def _played(name: str, card: bool, nccl: bool) -> list[Tensor]:
    if nccl:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    rank, model, found = dist.get_rank(), Model(CUT), []
    hook, make = HOOKS[name]
    state = make()
    for step in range(4):
        buckets = model.buckets(rank, step)
        found += play(hook, state, _on_card(buckets) if card else buckets)
    return [one.cpu() for one in found]


@pytest.mark.parametrize("name", HOOKS)
def test_two_ranks_on_one_card_over_gloo(ranks: RankPool, name: str) -> None:
    on_card, on_cpu = ranks(2).run(_played, name, True, False), ranks(2).run(_played, name, False, False)
    assert same_on_all(on_card)
    for one, other in zip(on_card[0], on_cpu[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", HOOKS)
def test_one_rank_over_nccl(ranks: RankPool, name: str) -> None:
    (on_card,) = ranks(1).run(_played, name, True, True, group=False)
    (on_cpu,) = ranks(1).run(_played, name, False, False)
    for one, other in zip(on_card, on_cpu, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
