"""What averaging gradients launches on a device: a copy and a multiplication for each bucket, whatever is in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce

COUNT = 60
WRITES = ("fill_", "copy_", "mul", "add", "zero_", "neg_", "clone")


class Work:
    def wait(self) -> None:
        pass


class Scales(AllReduce):
    """Over one process, which multiplies as if there were two."""

    def start(self, bucket: Bucket, scale: float) -> None:
        if scale != 1:
            bucket.flat.mul_(scale)
        bucket.work = Work()


class Sum(torch.autograd.Function):
    """Of all parameters; their gradients are ready-made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [parameter.shape for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, *(torch.ones(shape) for shape in ctx.shapes))


class Launches(TorchDispatchMode):
    """Operators that write memory of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in WRITES):
            self.count[str(func).removeprefix("aten.").rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def reducer_of(views: bool, static_graph: bool) -> Reducer:
    sizes = [4096 if index % 2 else 8 for index in range(COUNT)]
    named = [(str(index), nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]
    reducer = Reducer(
        named, transport=Scales(None), bucket_cap_mb=0.1, gradient_as_bucket_view=views, static_graph=static_graph
    )
    reducer.divisor = 2
    return reducer


def launches(reducer: Reducer, used: slice = slice(None)) -> Counter[str]:
    parameters = [*reducer._parameters.values()]
    x = torch.ones(8, requires_grad=True)
    found: Counter[str] = Counter()
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = None
        loss = Sum.apply(x, *parameters[used]).sum()
        with Launches() as mode:
            reducer.prepare()
            assert not any(parameter.grad is not None for parameter in parameters)
            loss.backward()
            reducer.finish()
        found = mode.count
    assert all(parameter.grad is not None for parameter in parameters[used])
    return found


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_bucket_is_filled_by_one_copy_and_scaled_by_one_multiplication(static_graph: bool) -> None:
    reducer = reducer_of(True, static_graph)
    found, buckets = launches(reducer), len(reducer.plan())
    assert buckets > 3
    marks = {} if static_graph else {"fill_": buckets}  # who has a gradient
    assert found == {"_foreach_copy_": buckets, "mul_": buckets, **marks}


def test_gradients_that_a_rank_lacks_are_cleared_together() -> None:
    reducer = reducer_of(True, False)
    found, buckets = launches(reducer, slice(0, None, 3)), len(reducer.plan())
    assert found["_foreach_zero_"] == found["_foreach_neg_"] == found["_foreach_copy_"] == found["mul_"] == buckets
    assert set(found) == {"_foreach_zero_", "_foreach_neg_", "_foreach_copy_", "mul_", "copy_"}


def test_gradients_beside_the_buckets_are_copied_together_both_ways() -> None:
    reducer = reducer_of(False, False)
    found, buckets = launches(reducer), len(reducer.plan())
    assert found == {"_foreach_copy_": 2 * buckets, "mul_": buckets, "fill_": buckets}
