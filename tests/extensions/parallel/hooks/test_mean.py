"""The hooks without a memory: values against one process, bits on all ranks, bytes, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.extensions.parallel.hooks import allreduce, bf16, fp16
from tests.extensions.parallel.hooks.pieces import SHAPES, Model, Shape, counted, play, same_on_all
from tests.tools.pool import RankPool

HALVES = {fp16: torch.float16, bf16: torch.bfloat16}
some_buckets = st.lists(st.lists(st.sampled_from(SHAPES), min_size=0, max_size=4), min_size=1, max_size=3)


def _on_rank(hook: Any, cut: list[list[Shape]], dtype: torch.dtype) -> list[Tensor]:
    return play(hook, None, Model(cut, dtype).buckets(dist.get_rank(), 0))


def _everyones(cut: list[list[Shape]], dtype: torch.dtype, world: int) -> list[list[Tensor]]:
    """Each bucket's gradients, by rank."""
    by_rank = [[bucket.buffer() for bucket in Model(cut, dtype).buckets(rank, 0)] for rank in range(world)]
    return [list(column) for column in zip(*by_rank, strict=True)]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=some_buckets, world=st.integers(1, 4), hook=st.sampled_from([fp16, bf16]))
def test_halves_are_rounded_twice_and_summed_in_float32(
    ranks: RankPool, cut: list[list[Shape]], world: int, hook: Any
) -> None:
    results = ranks(world).run(_on_rank, hook, cut, torch.float32)
    assert same_on_all(results)
    for found, sent in zip(results[0], _everyones(cut, torch.float32, world), strict=True):
        total = torch.zeros_like(found)
        for one in sent:
            total = total + one.to(HALVES[hook]).float()
        assert torch.equal(found, (total * (1 / world)).to(HALVES[hook]).float())
        truth = torch.stack(sent).double().mean(dim=0)
        largest = max(float(one.abs().max()) for one in sent) if found.numel() else 0.0
        assert bool(((found - truth).abs() <= largest * 2 * torch.finfo(HALVES[hook]).eps).all())


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=some_buckets, world=st.integers(1, 4))
def test_the_plain_mean(ranks: RankPool, cut: list[list[Shape]], world: int) -> None:
    results = ranks(world).run(_on_rank, allreduce, cut, torch.float64)
    assert same_on_all(results)
    for found, sent in zip(results[0], _everyones(cut, torch.float64, world), strict=True):
        torch.testing.assert_close(found, torch.stack(sent).mean(dim=0), rtol=1e-14, atol=1e-15)


@pytest.mark.everyday
@pytest.mark.parametrize("hook", [allreduce, fp16, bf16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float16, torch.bfloat16])
def test_other_dtypes_keep_their_kind(ranks: RankPool, hook: Any, dtype: torch.dtype) -> None:
    cut: list[list[Shape]] = [[(5, 3), (4,)]]
    results = ranks(2).run(_on_rank, hook, cut, dtype)
    ((found,), (again,)) = results
    assert found.dtype == dtype
    assert torch.equal(found, again)
    ((first, second),) = _everyones(cut, dtype, 2)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    truth = (first.to(wide) + second.to(wide)) / 2
    coarsest = max(torch.finfo(HALVES.get(hook, dtype)).eps, torch.finfo(dtype).eps)
    assert bool(((found.to(wide) - truth).abs() <= 8 * coarsest).all())


def _sent(hook: Any) -> tuple[float, list[str]]:
    buckets = Model([[(64, 60)]]).buckets(dist.get_rank(), 0)
    play(hook, None, buckets)  # makes the queue
    with counted() as wire:
        play(hook, None, buckets)
    return wire.bytes, wire.calls


@pytest.mark.parametrize("world", [2, 3])
def test_half_the_bytes_go_over_the_wire(ranks: RankPool, world: int) -> None:
    plain = ranks(world).run(_sent, allreduce)
    for hook in HALVES:
        for (sent, calls), (reference, once) in zip(ranks(world).run(_sent, hook), plain, strict=True):
            assert once == ["all_reduce"]
            assert calls[0] == "all_to_all_single"
            assert len(calls) == 2
            assert sent == pytest.approx(reference / 2)


def _with_infinities(hook: Any) -> list[Tensor]:
    rank = dist.get_rank()

    def change(flat: Tensor) -> None:
        flat[:4] = torch.tensor([1e6, 3.0, 1.0, 2.0]) if rank == 1 else torch.tensor([1.0, torch.nan, -torch.inf, 4.0])

    return play(hook, None, Model([[(9,)]]).buckets(rank, 0, change))


def test_what_is_not_finite_is_seen_on_all_ranks(ranks: RankPool) -> None:
    for (found,) in ranks(2).run(_with_infinities, fp16):
        assert found[0] == torch.inf  # 1e6 is none of float16's numbers
        assert found[1].isnan()
        assert found[2] == -torch.inf
        assert found[3] == 3
        assert bool(found[4:].isfinite().all())
    for (found,) in ranks(2).run(_with_infinities, bf16):
        assert found[0] == pytest.approx(5e5, rel=0.01)
        assert found[1].isnan()


def _many_rounds() -> list[Tensor]:
    model = Model([[(300, 20)], [(11,), (2, 3)], [(50,)]])
    others = []
    found: list[Tensor] = []
    for step in range(30):
        futures = [fp16(None, bucket) for bucket in model.buckets(dist.get_rank(), step)]
        flag = torch.tensor([float(step)])
        dist.all_reduce(flag)  # of the loop's own, while the hooks are under way
        others.append(flag.item())
        found = [future.wait().clone() for future in futures]
    assert others == [2.0 * step for step in range(30)]
    return found


def test_hooks_do_not_mix_with_the_messages_of_others(ranks: RankPool) -> None:
    assert same_on_all(ranks(2).run(_many_rounds))
