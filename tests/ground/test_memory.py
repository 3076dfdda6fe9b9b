"""Memory."""

from __future__ import annotations

import pytest
import torch

from lockstep.ground.memory import garbage_collection_cuda, is_oom_error, recursive_detach


def test_detaches_throughout() -> None:
    x = torch.ones(2, requires_grad=True)
    detached = recursive_detach({"a": [2 * x], "b": "text"}, to_cpu=True)
    assert not detached["a"][0].requires_grad
    assert detached["a"][0].tolist() == [2, 2]
    assert detached["b"] == "text"


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_out_of_memory(error: Exception, is_oom: bool) -> None:
    assert is_oom_error(error) is is_oom


def test_the_host_is_recognised_by_a_true_failure() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_oom_error(raised.value)


def test_collects_cycles() -> None:
    import weakref

    class Node:
        pass

    node = Node()
    node.self = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    del node
    garbage_collection_cuda()
    assert gone() is None
