"""A promise that all backwards are alike: one autograd hook a bucket, no used flags, and an error when it is broken."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce
from tests.engines.ddp.rounds import assert_close
from tests.tools.pool import RankPool

# -- a promise that all backwards are alike ------------------------------------------------------------------


WORLD = 2


class Net(nn.Module):
    """A layer that is used twice, one that never is, and one inside a gradient checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        hidden = self.first(x).relu()
        for _ in range(2):
            if kind == "plain":
                hidden = self.twice(hidden).tanh()
            else:
                hidden = checkpoint(lambda h: self.twice(h).tanh(), hidden, use_reentrant=kind == "reentrant")
        return self.last(hidden).sum()


def _batch(step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def _train(
    kind: str, views: bool, micro: int, to_none: bool, ranks: list[int], reducer: bool, zero_weight: int = -1
) -> Any:
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if reducer:
        attached = Reducer(
            net.named_parameters(), bucket_cap_mb=0.0002, gradient_as_bucket_view=views, static_graph=True
        )
    found = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=to_none)
        for index in range(micro):
            for rank in ranks:
                empty = step == zero_weight and rank == 1
                if reducer:
                    attached.sync = index + 1 == micro
                    attached.zero_weight = empty
                    attached.prepare()
                if reducer or not empty:
                    (net(_batch(step, rank, index), kind) / (1 if reducer else WORLD)).backward()
                if reducer:
                    attached.finish()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    counts = (len(attached._hooks), len(attached.buckets), attached.collectives) if reducer else None
    return found, counts


KINDS = ("plain", "reentrant", "anew")
WAYS = ((True, 1, True), (False, 2, True), (True, 2, False))


@pytest.mark.everyday
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("views", "micro", "to_none"), WAYS)
def test_gradients_are_those_of_one_process(ranks: RankPool, kind: str, views: bool, micro: int, to_none: bool) -> None:
    expected, _ = _train(kind, views, micro, to_none, [0, 1], False)
    jobs = [(kind, views, micro, to_none, [rank], True) for rank in range(WORLD)]
    for found, (hooks, buckets, collectives) in ranks(WORLD).run(_on_rank, jobs):
        assert_close(found, expected)
        assert buckets > 2
        assert hooks < buckets + 1  # one a bucket, none where nothing is used
        assert collectives == 4 * buckets + 1  # and the used flags of the first round


def _on_rank(jobs: list[Any]) -> Any:
    return _train(*jobs[dist.get_rank()])


@pytest.mark.parametrize("zero_weight", [0, 2])
def test_an_empty_share_is_no_broken_promise(ranks: RankPool, zero_weight: int) -> None:
    expected, _ = _train("plain", True, 1, True, [0, 1], False, zero_weight)
    jobs = [("plain", True, 1, True, [rank], True, zero_weight) for rank in range(WORLD)]
    for found, _ in ranks(WORLD).run(_on_rank, jobs):
        assert_close(found, expected)


def _broken(kind: str) -> str:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)}).double()
    reducer = Reducer(net.named_parameters(), static_graph=True)
    x = torch.ones(1, 2, dtype=torch.float64)
    error = ""
    for step in range(3):
        net.zero_grad()
        reducer.prepare()
        used = net["b"](net["a"](x)) if step < 2 or kind == "more" else net["a"](x)
        if kind == "more" and step == 2:
            used = net["c"](used)
        try:
            used.sum().backward()
            reducer.finish()
        except RuntimeError as caught:
            error = f"{step}: {caught}"
    return error


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("less", "2: .*parameter 'b.(weight|bias)' (got|had) no gradient"),
        ("more", "2: .*parameter 'c.bias' got a gradient"),
    ],
)
def test_a_broken_promise_names_the_parameter(ranks: RankPool, kind: str, says: str) -> None:
    for error in ranks(WORLD).run(_broken, kind):
        assert re.match(says, error), error


def _another_order(buckets: int) -> Any:
    """The same parameters, but the one whose gradient closed a bucket comes first from the third step on."""
    names = ["first", "second"] if buckets == 1 else ["third", "first", "second"]
    values = {name: nn.Parameter(torch.full((2,), 1.0 + index)) for index, name in enumerate(names)}
    cap = 25 if buckets == 1 else 16 / 2**20  # the last bucket holds the parameter whose gradient comes last
    first_cap = 25 if buckets == 1 else 8 / 2**20
    reducer = Reducer(values.items(), static_graph=True, bucket_cap_mb=cap, first_bucket_mb=first_cap)
    found = []
    for step in range(4):
        for parameter in values.values():
            parameter.grad = None
        order = ["first", "second"] if step < 2 else ["second", "first"]
        hidden = torch.full((2,), 1.0 + dist.get_rank())
        for name in (["third"] if buckets > 1 else []) + order:
            hidden = (hidden * values[name]).sin()
        reducer.prepare()
        try:
            hidden.sum().backward()
            reducer.finish()
        except RuntimeError as caught:
            return f"{step}: {caught}"
        found.append({name: parameter.grad for name, parameter in values.items()})
        found[-1] = {name: grad.clone() for name, grad in found[-1].items() if grad is not None}
    assert len(reducer.buckets) == buckets
    return found


def test_another_order_is_named_not_reduced_wrongly(ranks: RankPool) -> None:
    for error in ranks(WORLD).run(_another_order, 2):
        assert re.match("2: .*'second' had no gradient yet", error), error


def test_in_the_last_bucket_any_order_is_reduced_rightly(ranks: RankPool) -> None:
    """It does not travel before the backward has ended."""
    one, other = ranks(WORLD).run(_another_order, 1)
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        values = {"first": torch.full((2,), 1.0), "second": torch.full((2,), 2.0)}
        order = ["first", "second"] if step < 2 else ["second", "first"]
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        for rank in range(WORLD):
            hidden = torch.full((2,), 1.0 + rank)
            for name in order:
                hidden = (hidden * leaves[name]).sin()
            (hidden.sum() / WORLD).backward()
        for name, leaf in leaves.items():
            torch.testing.assert_close(mine[name], leaf.grad)
            assert torch.equal(mine[name], theirs[name])


def _frozen_in_between(views: bool, when: str) -> Any:
    """Ranks' and one process's parameters; one that closes a bucket is frozen around the first backward."""
    found = []
    for ranks, reduced in (([dist.get_rank()], True), ([0, 1], False)):
        torch.manual_seed(0)
        net = nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"}).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        reducer = (
            Reducer(net.named_parameters(), bucket_cap_mb=1e-5, gradient_as_bucket_view=views, static_graph=True)
            if reduced
            else None
        )
        for step in range(4):
            optimizer.zero_grad()
            parts = torch.stack([net["b"](net["a"](_batch(step, rank, 0)).tanh()).square().sum() for rank in ranks])
            if step == 0 and when == "before":
                net["a"].requires_grad_(False)
            if reducer is not None:
                reducer.prepare()
            (parts.sum() / (1 if reduced else WORLD)).backward()
            if step == 0 and when == "after":
                net["a"].requires_grad_(False)
            if reducer is not None:
                try:
                    reducer.finish()
                except RuntimeError as caught:
                    return str(caught)
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in net.parameters()])
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-15) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("views", [True, False])
def test_a_parameter_frozen_between_forward_and_backward_is_not_recorded(ranks: RankPool, views: bool) -> None:
    """Torch calls the hooks of a frozen parameter too; it was recorded as one with a gradient, and could not be."""
    assert ranks(WORLD).run(_frozen_in_between, views, "before") == [True] * WORLD


def test_a_parameter_frozen_after_its_recorded_gradient_breaks_the_promise(ranks: RankPool) -> None:
    """No hook could be put at it: torch said so, without a name."""
    for error in ranks(WORLD).run(_frozen_in_between, True, "after"):
        assert re.search("parameter 'a.(weight|bias)' (got|had) no gradient", str(error)), error


# -- hooks of a module on several devices, which autograd calls from several threads at once -----------------


class Slow(AllReduce):
    """Takes its time before it sends the first bucket."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[int] = []
        self.begun = threading.Event()
        self.patience = 0.0

    def start(self, bucket: Bucket, scale: float) -> None:
        self.begun.set()
        patience, self.patience = self.patience, 0.0
        time.sleep(patience)
        self.sent.append(bucket.index)

    def wait(self, bucket: Bucket) -> None:
        pass


@pytest.mark.parametrize("static", [False, True])
def test_threads_of_several_devices_send_buckets_in_order(static: bool) -> None:
    """A second thread sent its bucket while the first was about to: NCCL would have waited for ever on some rank."""
    carrier = Slow()
    wide = Parameter(torch.ones(3, dtype=torch.float64))
    named = {"there": Parameter(torch.ones(3, device="meta")), "here": Parameter(torch.ones(3)), "wide": wide}
    reducer = Reducer(named.items(), transport=carrier, static_graph=static)
    for _ in range(3):
        reducer.prepare()
        torch.autograd.backward([parameter.sum() for parameter in named.values()])
        reducer.finish()
    first, second, third = [named[name] for (name,) in reducer.plan()]
    carrier.sent.clear()
    carrier.begun.clear()
    carrier.patience = 0.1
    reducer.prepare()
    thread = threading.Thread(target=lambda: first.sum().backward())
    thread.start()
    assert carrier.begun.wait(5)
    second.sum().backward()
    thread.join()
    third.sum().backward()
    reducer.finish()
    assert carrier.sent == [0, 1, 2]
    reducer.detach()
