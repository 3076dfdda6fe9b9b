"""Gradients of replicas of a pipeline's stage: summed where they lie, and nobody waits for who has one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.balancing.pipeline import gradients
from lockstep.ground import comm
from tests.engines.ddp.test_first_round import Peak
from tests.tools.pool import RankPool

SHAPES = [(5,), (600, 512), (3, 2), (), (4, 1, 2), (7,)]
LACKING = {0: {2, 5}, 1: {4, 5}}
"""Places of the parameters that a rank does not use."""


def parameters_of(rank: int, complete: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(rank)
    made = []
    for place, shape in enumerate(SHAPES):
        dtype = torch.float64 if place % 2 else torch.float32
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        gradient = torch.randn(shape, dtype=dtype, generator=generator)
        if len(shape) > 1 and place != 1:
            gradient = gradient.transpose(0, -1).contiguous().transpose(0, -1)
        if complete or place not in LACKING[rank]:
            parameter.grad = gradient
        made.append(parameter)
    return made


def summed(complete: bool) -> list[Tensor | None]:
    parameters = parameters_of(dist.get_rank(), complete)
    before = [parameter.grad for parameter in parameters]
    if complete:  # who has a gradient is not asked for then: a GPU would wait for the backward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "tolist", None)
            found = gradients._sum(parameters, None, 0.5)
    else:
        found = gradients._sum(parameters, None, 0.5)
    assert all(own is None or own is one for own, one in zip(before, found, strict=True))
    return found


@pytest.mark.parametrize("complete", [False, True])
def test_gradients_are_the_mean_of_the_replicas(ranks: RankPool, complete: bool) -> None:
    of_ranks = [parameters_of(rank, complete) for rank in range(2)]
    for found in ranks(2).run(summed, complete):
        for one, *pair in zip(found, *of_ranks, strict=True):
            grads = [parameter.grad for parameter in pair if parameter.grad is not None]
            if not grads:
                assert one is None
                continue
            assert one is not None
            torch.testing.assert_close(one, sum(grad * 0.5 for grad in grads), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1000, 1000), (100, 100)])
def test_gradients_are_not_held_several_times(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 0.3 of them stand beside them while replicas are averaged; it was three times them."""
    monkeypatch.setattr(comm, "world_size", lambda group=None: 2)
    monkeypatch.setattr(comm, "carrier", lambda group, device: device)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(gradients, "TOGETHER", 2**18)
    parameters = [nn.Parameter(torch.ones(shape)) for _ in range(60)]
    for parameter in parameters:
        parameter.grad = torch.ones(shape)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with Peak(grads) as peak:
        gradients._sum(parameters, None, 0.5)
    assert peak.most <= 1.3 * sum(grad.nbytes for grad in grads)
