"""Errors in the callbacks of a communication hook's futures are the first cause, told with the line that raised."""

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

from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel.hooks import allreduce, fp16_wrapper, power_sgd
from lockstep.extensions.parallel.hooks.hook_transport import HookTransport, in_order, keeps_order, tensor_of
from lockstep.ground import comm
from lockstep.strategies import DDPStrategy
from tests.extensions.parallel.hooks.pieces import Model, play, same_on_all
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.pool import RankFailure, RankPool

# -- errors in the callbacks of a communication hook's futures are the first cause, told with the line that ra


def then(state: Any, bucket: Any) -> Any:
    def finish(future: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        return future.value()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finish)


def completing_another(state: Any, bucket: Any) -> Any:
    made: Any = torch.futures.Future()

    def finish(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        made.set_result(future.value()[0])

    dist.all_reduce(bucket.buffer(), async_op=True).get_future().add_done_callback(finish)
    return made


def beside(state: Any, bucket: Any) -> Any:
    def look(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")

    found = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    found.add_done_callback(look)
    return found


def in_a_callback(state: Any, bucket: Any) -> Any:
    made: Any = torch.futures.Future()

    def second(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        made.set_result(bucket.buffer())

    def first(future: Any) -> None:
        further: Any = torch.futures.Future()
        further.add_done_callback(second)
        further.set_result(None)

    dist.all_reduce(bucket.buffer(), async_op=True).get_future().add_done_callback(first)
    return made


@pytest.mark.parametrize("hook", [then, completing_another, beside, in_a_callback])
def test_an_error_in_a_callback_is_the_first_cause(ranks: RankPool, hook: Any) -> None:
    """Torch printed it and went on, or never ended the future: the rank hung, and another one was blamed."""

    def fit() -> None:
        quiet(strategy=DDPStrategy(ddp_comm_hook=hook), devices=2, max_epochs=3).fit(Slope(), numbers(16))

    with pytest.raises(RankFailure, match="failed on rank 1 of 2: ValueError: the callback failed") as caught:
        ranks(2).run(fit, timeout=20)
    assert 'raise ValueError("the callback failed")' in caught.value.stack


def test_callbacks_of_others_are_left_alone(ranks: RankPool) -> None:
    def fit() -> list[str]:
        quiet(strategy=DDPStrategy(ddp_comm_hook=beside), devices=1, max_epochs=1).fit(Slope(), numbers(2))
        made: Any = torch.futures.Future()
        made.add_done_callback(lambda future: found.append("done"))
        made.then(lambda future: found.append("then"))
        made.set_result(1)
        return found

    found: list[str] = []
    assert ranks(1).run(fit) == [["done", "then"]]


# -- what a hook gives back ----------------------------------------------------------------------------------


def my_hook(state: Any, bucket: Any) -> Any: ...


@pytest.mark.parametrize("value", [torch.ones(6), [torch.ones(6)], (torch.ones(2, 3),), torch.ones(6).half()])
def test_a_tensor_of_the_buffers_size_is_taken(value: Any) -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    found = tensor_of(value, bucket, my_hook)
    assert found.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "contains None"),
        (7, "contains a int"),
        ([torch.ones(6)] * 2, "contains a list of 2"),
        (torch.ones(5), r"a tensor of 5 elements \(torch.float32 on cpu\)"),
        (torch.ones(6, dtype=torch.int64), "torch.int64"),
        (torch.ones(6, device="meta"), "on meta"),
        (torch.ones(6, dtype=torch.complex64), "complex64"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, said: str) -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    with pytest.raises(TypeError, match=r"rank 0: the future of the communication hook my_hook contains.*") as caught:
        tensor_of(value, bucket, my_hook)
    assert caught.match(said)
    assert caught.match("bucket 0 it must contain a tensor of 6 elements")


def test_strided_results_are_read_in_their_order() -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    value: Tensor = torch.arange(6.0).view(3, 2).t()
    assert tensor_of(value, bucket, my_hook).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


# -- torch's hooks, and users', on our buckets ---------------------------------------------------------------


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


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("cpu", True)])
def test_a_hook_waits_for_the_last_one_on_gloo_only(monkeypatch: pytest.MonkeyPatch, device: str, waits: bool) -> None:
    """Beside gloo for CPU tensors ("cpu:gloo,cuda:nccl", torch's default) NCCL's waited, and overlapped no more."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(comm, "world_size", lambda group: 2)
    monkeypatch.setattr(AllReduce, "buffers", lambda self, sizes: [])
    hooked: Any = HookTransport(None, None, lambda state, bucket: torch.futures.Future(), list, lambda: None)
    hooked.buffers([(4, torch.float32, torch.device(device, 0))])
    hooked._last = torch.futures.Future()
    asked: list[bool] = []
    monkeypatch.setattr(torch.futures.Future, "wait", lambda self: asked.append(True))
    hooked.flush()
    assert asked == [True] * waits
