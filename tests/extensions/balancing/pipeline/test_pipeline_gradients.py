"""Memory of gradients of replicas of a pipeline's stage while they are summed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.extensions.balancing.pipeline import gradients
from lockstep.ground import comm
from tests.engines.ddp.test_first_round import Peak


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
