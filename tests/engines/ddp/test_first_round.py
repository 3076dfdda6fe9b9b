"""Behind the first round buckets are laid out anew: gradients are there once, when the optimizer makes its states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import MIB, Reducer
from lockstep.engines.ddp.transport import AllReduce
from tests.tools.pool import RankPool

WIDTH, BLOCKS = 32, 24


class Net(nn.Module):
    """Its layers are used in another order than they are registered in, but for most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        out: Tensor = self.head(x)
        return out


CAPS: Any = dict.fromkeys(("bucket_cap_mb", "first_bucket_mb"), 3 * WIDTH * WIDTH * 4 / MIB)


class Alone(AllReduce):
    """Sums over this process."""

    def start(self, bucket: Bucket, scale: float) -> None:
        bucket.work = True

    def wait(self, bucket: Bucket) -> None:
        pass


class Peak(TorchDispatchMode):
    """The most bytes that are there at a time: of ``tensors``, and of what is made inside."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0
        self.watch(tensors)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(each for each in tree_leaves(result) if isinstance(each, Tensor))
        return result


def held(reducer: Reducer, net: nn.Module) -> float:
    """Memory of gradients and buckets, in units of the gradients."""
    tensors = [*reducer.memory(), *[p.grad for p in net.parameters() if p.grad is not None]]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / sum(p.nbytes for p in net.parameters())


def first_rounds(options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    net = Net()
    reducer = Reducer(net.named_parameters(), **CAPS, **options)
    found, plans = [], [reducer.plan()]
    for _ in range(3):
        net.zero_grad()
        reducer.prepare()
        net(torch.randn(4, WIDTH)).square().mean().backward()
        reducer.finish()
        plans.append(reducer.plan())
        found.append(held(reducer, net))
    assert plans[0] != plans[1] == plans[3]
    reducer.detach()
    return found


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"static_graph": True}], ids=str)
def test_gradients_are_held_once_on_ranks(ranks: RankPool, options: dict[str, Any]) -> None:
    for found in ranks(2).run(first_rounds, options):
        assert max(found) < 1.1


def test_buckets_move_one_by_one() -> None:
    """While buckets are laid out anew, gradients are not all there twice."""
    net = Net()
    reducer = Reducer(net.named_parameters(), transport=Alone(None), **CAPS)
    reducer.prepare()
    net(torch.randn(4, WIDTH)).square().mean().backward()
    before = sum(flat.nbytes for flat in reducer.memory())
    with Peak(reducer.memory()) as peak:
        reducer.finish()
    assert peak.most < 1.3 * before
    assert held(reducer, net) < 1.1
