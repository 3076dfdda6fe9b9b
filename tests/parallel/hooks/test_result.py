"""What a hook gives back: taken, or refused with the hook's name, what came, and the rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.parallel.hooks.hook_transport import future_of, tensor_of
from lockstep.parallel.hooks.ordering import completed
from tests.parallel.hooks.pieces import Model


def my_hook(state: Any, bucket: Any) -> Any: ...


@pytest.mark.parametrize("value", [torch.ones(6), [torch.ones(6)], (torch.ones(2, 3),), torch.ones(6).half()])
def test_a_tensor_of_the_buffers_size_is_taken(value: Any) -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    found = tensor_of(value, bucket, my_hook)
    assert found.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "holds None"),
        (7, "holds a int"),
        ([torch.ones(6)] * 2, "holds a list of 2"),
        (torch.ones(5), r"a tensor of 5 elements \(torch.float32 on cpu\)"),
        (torch.ones(6, dtype=torch.int64), "torch.int64"),
        (torch.ones(6, device="meta"), "on meta"),
        (torch.ones(6, dtype=torch.complex64), "complex64"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, said: str) -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    with pytest.raises(TypeError, match=r"rank 0: the future of the communication hook my_hook holds.*") as caught:
        tensor_of(value, bucket, my_hook)
    assert caught.match(said)
    assert caught.match("bucket 0 it must hold a tensor of 6 elements")


def test_a_hook_returns_a_future() -> None:
    future = completed(torch.ones(1))
    assert future_of(future, my_hook) is future
    then = future.then(lambda done: done.value())
    assert future_of(then, my_hook) is then
    for wrong, said in ((None, "NoneType"), (torch.ones(3), "Tensor"), (3, "int")):
        with pytest.raises(TypeError, match=rf"rank 0: the communication hook my_hook returned {said}.*Future"):
            future_of(wrong, my_hook)


def test_strided_results_are_read_in_their_order() -> None:
    (bucket,) = Model([[(2, 3)]]).buckets(0, 0)
    value: Tensor = torch.arange(6.0).view(3, 2).t()
    assert tensor_of(value, bucket, my_hook).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]
