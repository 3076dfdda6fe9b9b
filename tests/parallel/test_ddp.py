"""DistributedDataParallel in hand-written loops, against one process and torch's; how ranks start alike."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.ddp import (
    DistributedDataParallel,
    broadcast_module_state,
    check_same_module,
    sync_buffers,
)
from lockstep.testing.pool import RankPool


class Branches(nn.Module):
    """Answers a dict of outputs; a loss may use any of them."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.left = nn.Linear(6, 2)
        self.right = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.trunk(x)
        if self.reentrant:
            x = checkpoint(lambda x: self.trunk(x).tanh(), x, use_reentrant=True)
        else:
            x = self.trunk(x).tanh()
        return {"left": self.left(x), "more": [self.right(x)], "bias": self.trunk.bias}


def _branches(reentrant: bool = False) -> Branches:
    torch.manual_seed(1)
    return Branches(reentrant).double()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step * 10 + rank))


def _loss(outputs: dict[str, Any], step: int) -> Tensor:
    """Of one branch, both, or the parameter that is handed out as it is."""
    left, right, bias = outputs["left"].square(), outputs["more"][0].sin(), outputs["bias"]
    return (left.mean(), left.mean() + right.mean(), right.sum() * bias.sum(), bias.square().sum())[step % 4]


def _loop(wrap: str, reentrant: bool, accumulate: bool) -> tuple[list[list[Tensor | None]], int]:
    net = _branches(reentrant)
    model: Any = net
    if wrap == "ours":
        model = DistributedDataParallel(net, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ranks = [dist.get_rank()] if wrap else [0, 1]
    found: list[list[Tensor | None]] = []
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in ranks:
                quiet = wrap and accumulate and micro == 0
                with model.no_sync() if quiet else contextlib.nullcontext():
                    loss = _loss(model(_batch(step + 50 * micro, rank)), step)
                (loss / len(ranks)).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found, model.reducer.rounds if wrap else 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_hand_written_loop_has_the_gradients_of_one_process(
    ranks: RankPool, reentrant: bool, accumulate: bool
) -> None:
    expected, _ = _loop("", False, accumulate)
    for found, rounds in ranks(2).run(_loop, "ours", reentrant, accumulate):
        assert rounds == (6 if accumulate else 12)
        for mine, right in zip(found, expected, strict=True):
            for grad, reference in zip(mine, right, strict=True):
                assert (grad is None) == (reference is None)
                if grad is not None and reference is not None:
                    assert (grad - reference).abs().max() <= 1e-12 * reference.abs().max()


def _beside_torch() -> list[bool]:
    results = []
    nets = []
    for wrapper in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(dist.get_rank())  # the constructor makes them alike
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        model = wrapper(net)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(4):
            optimizer.zero_grad()
            model(_batch(step, dist.get_rank()).float()).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            results.append(model(_batch(9, 0).float()))
        nets.append(model.state_dict())
    ours, theirs = nets
    return [list(ours) == list(theirs), *(torch.equal(ours[name], theirs[name]) for name in ours)]


def test_bits_buffers_and_keys_are_those_of_torch(ranks: RankPool) -> None:
    for alike in ranks(2).run(_beside_torch):
        assert all(alike)


def _failing_backward() -> Tensor:
    model = DistributedDataParallel(_branches())
    outputs = model(_batch(0, 0))
    outputs["left"].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (outputs["more"][0].sum() + outputs["left"].sum()).backward()
    model.zero_grad()
    _loss(model(_batch(0, dist.get_rank())), 0).backward()
    assert model.module.left.weight.grad is not None
    return model.module.left.weight.grad


def test_a_failed_backward_does_not_silence_the_next(ranks: RankPool) -> None:
    first, second = ranks(2).run(_failing_backward)
    alone = _branches()
    for rank in range(2):
        (_loss(alone(_batch(0, rank)), 0) / 2).backward()
    assert torch.equal(first, second)
    assert torch.allclose(first, alone.left.weight.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_one_process_runs_the_module_as_it_is() -> None:
    net = _branches()
    model = DistributedDataParallel(net, [torch.device("cpu")])
    _loss(model(_batch(0, 0)), 0).backward()
    grad = net.left.weight.grad
    alone = _branches()
    _loss(alone(_batch(0, 0)), 0).backward()
    assert torch.equal(grad, alone.left.weight.grad)  # type: ignore[arg-type]
    assert set(model.state_dict()) == {f"module.{name}" for name in net.state_dict()}


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ValueError, match=r"Linear\): no parameter requires a gradient"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"device_ids=\[0, 1\]: a process drives one device"):
        DistributedDataParallel(nn.Linear(2, 2), [0, 1])


def _differing(kind: str) -> str:
    odd = dist.get_rank() == 1
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if odd and kind == "shape":
        net[0] = nn.Linear(2, 3)
    elif odd and kind == "order":
        net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    elif odd and kind == "frozen":
        net[1].requires_grad_(False)
    elif odd and kind == "more":
        net.append(nn.Linear(2, 2))
    elif odd and kind == "buffer":
        net[1].double()
    with pytest.raises(ValueError) as raised:
        check_same_module(net)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", "rank 1 has parameter '0.weight' (torch.float32, shape (3, 2))"),
        ("order", "rank 0 has parameter '0.weight' (torch.float32, shape (2, 2)), rank 1"),
        ("frozen", "rank 1 has parameter '1.weight' (torch.float32, shape (2,), frozen)"),
        ("more", "rank 1 has parameter '2.weight'"),
        ("buffer", "rank 1 has parameter '1.weight' (torch.float64"),
    ],
)
def test_modules_that_differ_are_refused_on_every_rank(ranks: RankPool, kind: str, said: str) -> None:
    first, second = ranks(2).run(_differing, kind)
    assert first == second
    assert said in first


def _alike() -> list[Any]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_same_module(net)
    net[1].num_batches_tracked += dist.get_rank()
    own = net[0].weight.detach().clone()
    sync_buffers(net)
    tracked, kept = int(net[1].num_batches_tracked), torch.equal(own, net[0].weight)
    broadcast_module_state(net)
    return [tracked, kept, net[0].weight.detach().clone()]


def test_state_and_buffers_come_from_rank_zero(ranks: RankPool) -> None:
    first, second = ranks(2).run(_alike)
    assert first[:2] == second[:2] == [0, True]
    assert torch.equal(first[2], second[2])
