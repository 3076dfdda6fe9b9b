"""What has changed in a module since it was wrapped."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel.wrapping import find_cast


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_a_parameter_that_was_cast_or_resized_is_found() -> None:
    net = _net()
    reducer = Reducer(net.named_parameters(), transport=AllReduce(None))
    assert find_cast(reducer.buckets) is None
    net[0].bias.data = torch.zeros(3)
    assert str(find_cast(reducer.buckets)).startswith("parameter '0.bias' is torch.float32 of shape (3,)")
    net.double()
    assert str(find_cast(reducer.buckets)).startswith("parameter '1.bias' is torch.float64 of shape (2,)")
    reducer.detach()
