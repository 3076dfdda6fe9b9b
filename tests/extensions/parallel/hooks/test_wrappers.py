"""Wrappers, lockstep's and torch's, around hooks of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.extensions.parallel.hooks import PowerSGDState, allreduce, bf16, bf16_wrapper, fp16_wrapper, power_sgd
from lockstep.extensions.parallel.hooks.hook_transport import innermost
from tests.extensions.parallel.hooks.pieces import Model, counted, play, same_on_all
from tests.tools.pool import RankPool

CUT = [[(20, 30), (5,)], [(4, 3)]]
WRAPPERS = {
    "fp16": (fp16_wrapper, torch.float16),
    "bf16": (bf16_wrapper, torch.bfloat16),
    "torch fp16": (default_hooks.fp16_compress_wrapper, torch.float16),
    "torch bf16": (default_hooks.bf16_compress_wrapper, torch.bfloat16),
}


def _played(wrapper: str, hook: Any, state: Any) -> tuple[list[Tensor], float]:
    model, wrapped = Model(CUT), WRAPPERS[wrapper][0](hook)
    play(wrapped, state, model.buckets(dist.get_rank(), 0))
    with counted() as wire:
        found = play(wrapped, state, model.buckets(dist.get_rank(), 1))
    return found, wire.bytes


@pytest.mark.everyday
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [allreduce, bf16, "power"])
def test_a_wrapped_hook_gets_16_bits(ranks: RankPool, wrapper: str, hook: Any) -> None:
    state = None
    if hook == "power":
        hook, state = power_sgd, PowerSGDState(rank=20, start=0, min_compression_rate=0)
    results = ranks(2).run(_played, wrapper, hook, state)
    (found, sent), (again, _) = results
    assert same_on_all([found, again])
    by_rank = [Model(CUT).buckets(rank, 1) for rank in range(2)]
    coarse = torch.finfo(WRAPPERS[wrapper][1]).eps * (40 if hook is power_sgd else 4)
    for index, one in enumerate(found):
        assert one.dtype == torch.float32
        truth = (by_rank[0][index].buffer() + by_rank[1][index].buffer()) / 2
        assert float((one - truth).abs().max()) < coarse * float(truth.abs().max())
    if hook is allreduce:
        assert sent == 2 * 617


def test_a_wrapper_is_seen_through() -> None:
    for wrapper, _ in WRAPPERS.values():
        assert innermost(wrapper(fp16_wrapper(power_sgd))) is power_sgd
    assert fp16_wrapper(bf16).__name__ == "fp16_wrapper(bf16)"


def test_complex_gradients_are_refused() -> None:
    (bucket,) = Model([[(3,)]], torch.complex64).buckets(0, 0)
    with pytest.raises(TypeError, match=r"complex64.*pairs of real numbers"):
        fp16_wrapper(allreduce)(None, bucket)
