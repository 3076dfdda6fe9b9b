"""torch's hooks, and users', on our buckets: values of torch's own container, and messages in one order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from lockstep.parallel.hooks import allreduce, fp16_wrapper, power_sgd
from lockstep.parallel.hooks.hook_transport import in_order, keeps_order
from lockstep.testing.pool import RankPool
from tests.parallel.hooks.pieces import Model, play, same_on_all

CUT = [[(60, 50), (4,)], [(16, 3, 5)], [(40, 30), (30,)]]


def _power(wrapped: bool, disturb: bool) -> list[Tensor]:
    hook: Any = powerSGD_hook.powerSGD_hook
    if wrapped:
        hook = default_hooks.fp16_compress_wrapper(hook)
    hook = in_order(hook)
    state = powerSGD_hook.PowerSGDState(None, 3, 2, min_compression_rate=0.1, orthogonalization_epsilon=1e-6)
    model, found = Model(CUT), []
    for step in range(6):
        futures = [hook(state, bucket) for bucket in model.buckets(dist.get_rank(), step)]
        if disturb:
            time.sleep(0.003 * dist.get_rank())
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [2.0] * 3
        found = [future.wait() for future in futures]
    assert state.process_group is None
    return [one.float().clone() for one in found]


@pytest.mark.parametrize("wrapped", [False, True])
def test_torchs_power_sgd_keeps_its_messages_in_order(ranks: RankPool, wrapped: bool) -> None:
    """On gloo, its second messages went out from gloo's threads, at the same time as the next bucket's first."""
    calm, busy = ranks(2).run(_power, wrapped, False), ranks(2).run(_power, wrapped, True)
    assert same_on_all([*calm, *busy])


def _one_bucket_each() -> list[Tensor]:
    """The same by hand: a bucket at a time, the next when it is done."""
    state = powerSGD_hook.PowerSGDState(None, 3, 2, min_compression_rate=0.1, orthogonalization_epsilon=1e-6)
    model, found = Model(CUT), []
    for step in range(6):
        found = [powerSGD_hook.powerSGD_hook(state, b).wait().clone() for b in model.buckets(dist.get_rank(), step)]
    return found


def test_a_lane_changes_no_bit_of_torchs_power_sgd(ranks: RankPool) -> None:
    assert same_on_all([*ranks(2).run(_one_bucket_each), *ranks(2).run(_power, False, False)])


def _plain(name: str) -> list[Tensor]:
    hook = in_order(getattr(default_hooks, name))
    return play(hook, None, Model(CUT).buckets(dist.get_rank(), 0))


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_torchs_plain_hooks(ranks: RankPool, name: str) -> None:
    results = ranks(2).run(_plain, name)
    assert same_on_all(results)
    by_rank = [Model(CUT).buckets(rank, 0) for rank in range(2)]
    for index, found in enumerate(results[0]):
        truth = (by_rank[0][index].buffer() + by_rank[1][index].buffer()) / 2
        torch.testing.assert_close(found, truth, rtol=0.02, atol=0.02)


def test_hooks_that_may_overlap() -> None:
    known = [
        allreduce,
        power_sgd,
        fp16_wrapper(power_sgd),
        fp16_wrapper(default_hooks.allreduce_hook),
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        default_hooks.bf16_compress_wrapper(power_sgd),
        post_localSGD_hook.post_localSGD_hook,
        debugging_hooks.noop_hook,
    ]
    assert all(in_order(hook) is hook and keeps_order(hook) for hook in known)

    def mine(state: Any, bucket: Any) -> Any: ...

    assert in_order(mine) is mine
    assert not keeps_order(mine)
    assert not keeps_order(fp16_wrapper(mine))
    mine.overlaps = True  # type: ignore[attr-defined]
    assert keeps_order(mine)
    assert keeps_order(fp16_wrapper(mine))
    power = powerSGD_hook.powerSGD_hook
    assert not keeps_order(power)
    assert keeps_order(in_order(power))
    assert keeps_order(in_order(default_hooks.fp16_compress_wrapper(power)))
    once = in_order(power)
    assert in_order(once) is once


def test_what_torchs_power_sgd_remembers_of_other_buckets_is_dropped() -> None:
    hook = in_order(powerSGD_hook.powerSGD_hook)
    state = powerSGD_hook.PowerSGDState(None, 1, 2)
    state.error_dict[0] = state.p_memory_dict[0] = torch.ones(3)
    one, other = Model(CUT[:1]).buckets(0, 0), Model(CUT[:1]).buckets(0, 0)
    for buckets, kept in ((one, 1), (one, 1), (other, 0)):
        hook._forget_others(state, buckets[0])  # type: ignore[attr-defined]
        assert len(state.error_dict) == len(state.p_memory_dict) == kept
