"""What a communication hook is given of each bucket, in which order, and what it may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook
from tests.tools.pool import RankPool

# -- the bucket layout ---------------------------------------------------------------------------------------


def _hooked() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(7, 7))
    seen: list[Any] = []

    def halve(state: str, bucket: GradBucket) -> Any:
        shapes = [tuple(g.shape) for g in bucket.gradients()] == [tuple(p.shape) for p in bucket.parameters()]
        length = bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        seen.append((state, bucket.index(), bucket.is_last(), shapes, length))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: [done.value()[0] / 4])

    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.00002, first_bucket_mb=0.00002)
    attach_hook(reducer, "state", halve)
    with pytest.raises(RuntimeError, match="only one hook"):
        attach_hook(reducer, None, halve)
    grads = []
    for _ in range(2):
        net.zero_grad()
        reducer.prepare()
        net[:2](torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        reducer.finish()
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    return seen, grads, len(reducer.plan())


def test_a_hook_gets_undivided_gradients_without_gaps(ranks: RankPool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(7, 7))
    for rank in range(2):
        (net[:2](torch.full((1, 3), 1.0 + rank)).sum() / 4).backward()
    for seen, grads, buckets in ranks(2).run(_hooked):
        assert len(seen) == 2 * buckets
        assert [index for _, index, *_ in seen] == list(range(buckets)) * 2
        assert all(state == "state" and shapes and length for state, _, _, shapes, length in seen)
        assert [last for _, _, last, *_ in seen] == ([False] * (buckets - 1) + [True]) * 2
        for grad, right in zip(grads, [p.grad for p in net.parameters()], strict=True):
            assert (grad is None) == (right is None)
            assert grad is None or torch.allclose(grad, right, rtol=1e-6)


def _chained(overlaps: bool) -> list[str]:
    """Notes when a hook is called for a bucket, and when the bucket's second message is on its way."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    notes: list[str] = []

    def twice(state: None, bucket: GradBucket) -> Any:
        index, buffer = bucket.index(), bucket.buffer()
        notes.append(f"called {index}")

        def second(done: Any) -> Tensor:
            dist.all_reduce(buffer)  # a callback of a gloo future: in another thread
            notes.append(f"done {index}")
            return buffer

        return dist.all_reduce(buffer, async_op=True).get_future().then(second)

    twice.overlaps = overlaps  # type: ignore[attr-defined]
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.00006, first_bucket_mb=0.00006)
    attach_hook(reducer, None, twice)
    for _ in range(2):
        reducer.prepare()
        net(torch.ones(1, 4)).sum().backward()
        reducer.finish()
    return notes


def test_hooks_that_chain_messages_go_bucket_by_bucket(ranks: RankPool) -> None:
    for notes in ranks(2).run(_chained, False):
        expected = [f"{what} {index}" for index in range(4) for what in ("called", "done")]
        assert notes == expected * 2
