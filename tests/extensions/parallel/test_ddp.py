"""DistributedDataParallel in hand-written loops, against one process and torch's; how ranks start alike."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool


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


@pytest.mark.everyday
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


def _same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Gradients, parameter by parameter."""
    assert len(found) == len(expected)
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None and right is not None:
            mine, right = mine.to_dense(), right.to_dense()
            assert (mine - right).abs().max() <= 1e-12 * right.abs().max().clamp_min(1e-300)


def _grads(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def _on_ranks(scene: str, world: int) -> list[list[Tensor | None]]:
    """The scene's gradients, of each step; on one process (world 0) of the mean of two ranks' losses."""
    torch.manual_seed(4)
    return SCENES[scene](world)


def _data(step: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _places(world: int) -> list[int]:
    return [dist.get_rank()] if world else [0, 1]


def _wrap(net: nn.Module, world: int, **settings: Any) -> Any:
    return DistributedDataParallel(net.double(), bucket_cap_mb=0.0002, **settings) if world else net.double()


def _steps(
    net: nn.Module, model: Any, loss_of: Any, world: int, steps: int = 4, others: tuple[nn.Module, ...] = ()
) -> list[list[Tensor | None]]:
    """SGD; the gradients of every step."""
    optimizer = torch.optim.SGD([p for one in (net, *others) for p in one.parameters()], 0.05)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in _places(world):
            loss = loss_of(model, step, rank)
            (loss if world else loss / 2).backward()
        found.append(_grads(net) + [grad for other in others for grad in _grads(other)])
        optimizer.step()
    return found


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _several_forwards(world: int) -> Any:
    net = _mlp(4, 5, 2)

    def loss(model: Any, step: int, rank: int) -> Tensor:
        outputs = [model(_data(step, 10 * rank + i, 3, 4)).square().mean() for i in range(1 + (step + rank) % 3)]
        return torch.stack(outputs).sum()

    return _steps(net, _wrap(net, world), loss, world)


def _gan(world: int) -> Any:
    """Two nets and two backwards a step; the second goes through both."""
    maker, judge = _mlp(3, 5, 4), _mlp(4, 5, 1)
    made, judged = _wrap(maker, world), _wrap(judge, world)
    makers, judges = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
    found = []
    for step in range(4):
        judges.zero_grad()
        for rank in _places(world):
            false = made(_data(step, rank, 6, 3)).detach()
            loss = judged(false).mean() - judged(_data(step, rank + 7, 6, 4)).mean()
            (loss if world else loss / 2).backward()
        found.append(_grads(judge))
        judges.step()
        makers.zero_grad()
        for rank in _places(world):
            loss = -judged(made(_data(step, rank, 6, 3))).mean()
            (loss if world else loss / 2).backward()
        found.append(_grads(maker))
        makers.step()
    return found


def _penalty(world: int) -> Any:
    """The loss is made of a gradient: its backward goes around the outputs."""
    net = _mlp(4, 5, 5, 1)

    def loss(model: Any, step: int, rank: int) -> Tensor:
        x = _data(step, rank, 6, 4).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + (model(x).mean() if step % 2 else 0)

    return _steps(net, _wrap(net, world), loss, world)


class Kept(nn.Module):
    """Keeps a part of its loss for itself, and answers in an object of its own."""

    class Answer:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x).tanh()
        self.balance = x.square().mean()
        return Kept.Answer(self.head(x))


def _around(world: int) -> Any:
    net = Kept()

    def loss(model: Any, step: int, rank: int) -> Tensor:
        value = model(_data(step, rank, 3, 4)).value.square().mean()
        balance = net.balance
        return (value, balance, value + balance, balance * 2)[step % 4]

    return _steps(net, _wrap(net, world), loss, world)


class Recurrent(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def _all_checkpointed(world: int, reentrant: bool, static: bool = False) -> Any:
    """Shared layers, with nothing outside of the checkpoints."""
    net = Recurrent(reentrant)

    def loss(model: Any, step: int, rank: int) -> Tensor:
        return model(_data(step, rank, 3, 4).requires_grad_()).square().mean()

    return _steps(net, _wrap(net, world, static_graph=static), loss, world)


def _checkpointed_whole(world: int, reentrant: bool) -> Any:
    """The container itself is in the checkpoint, and its forward runs again inside the backward."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def loss(model: Any, step: int, rank: int) -> Tensor:
        net.eval()
        return checkpoint(model, _data(step, rank, 3, 4).requires_grad_(), use_reentrant=reentrant).square().mean()

    return _steps(net, _wrap(net, world), loss, world)


def _sparse(world: int) -> Any:
    net = nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 2))

    def loss(model: Any, step: int, rank: int) -> Tensor:
        return model(torch.arange(6).view(3, 2) + step % 2 + 2 * rank).square().mean()

    return _steps(net, _wrap(net, world), loss, world)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() * self.scale


def _complex(world: int) -> Any:
    net = Complex()
    net.scale.data = net.scale.data.double()
    model = DistributedDataParallel(net) if world else net
    return _steps(net, model, lambda model, step, rank: model(_data(step, rank, 3, 4)).square().mean(), world)


def _toggled(world: int) -> Any:
    """One half frozen in every other step, and after it the other, as in GANs."""
    net = _mlp(4, 5, 2)
    model = _wrap(net, world)

    def loss(model: Any, step: int, rank: int) -> Tensor:
        net[0].requires_grad_(step % 3 != 1)
        net[2].requires_grad_(step % 3 != 2)
        return model(_data(step, rank, 3, 4)).square().mean()

    return _steps(net, model, loss, world, 6)


def _outside(world: int) -> Any:
    """Parameters outside of the container add to the loss, and so do the module's own, past the forward."""
    net, head = _mlp(4, 5, 5), _mlp(5, 2)
    model, last = _wrap(net, world), _wrap(head, world)

    def loss(model: Any, step: int, rank: int) -> Tensor:
        decay = sum((p.square().sum() for p in net.parameters()), torch.zeros(()))
        return last(model(_data(step, rank, 3, 4))).square().mean() + 0.1 * decay

    return _steps(net, model, loss, world, others=(head,))


def _accumulated(world: int) -> Any:
    """Three micro-batches, two of them under no_sync; the second's backward follows the third's forward."""
    net = _mlp(4, 5, 2)
    model = _wrap(net, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in _places(world):
            with model.no_sync() if world else contextlib.nullcontext():
                model(_data(step, rank, 3, 4)).square().mean().div(1 if world else 2).backward()
                later = model(_data(step, rank + 20, 3, 4)).square().mean().div(1 if world else 2)
            last = model(_data(step, rank + 40, 3, 4)).square().mean().div(1 if world else 2)
            later.backward()
            last.backward()
        found.append(_grads(net))
        optimizer.step()
    return found


def _kept_zeros(world: int) -> Any:
    """Gradients are set to zero in place, detached, and not dropped."""
    net = _mlp(4, 5, 2)
    model = _wrap(net, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for rank in _places(world):
            model(_data(step, rank, 3, 4)).square().mean().div(1 if world else 2).backward()
        found.append(_grads(net))
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
        optimizer.step()
    return found


SCENES: dict[str, Any] = {
    "several forwards": _several_forwards,
    "two nets, two backwards": _gan,
    "gradient penalty": _penalty,
    "losses around the outputs": _around,
    "all in re-entrant checkpoints": lambda world: _all_checkpointed(world, True),
    "all in checkpoints": lambda world: _all_checkpointed(world, False),
    "all in re-entrant checkpoints, static": lambda world: _all_checkpointed(world, True, True),
    "itself in a checkpoint": lambda world: _checkpointed_whole(world, False),
    "itself in a re-entrant checkpoint": lambda world: _checkpointed_whole(world, True),
    "sparse gradients": _sparse,
    "complex and mixed dtypes": _complex,
    "frozen and thawed": _toggled,
    "more than the outputs": _outside,
    "accumulation": _accumulated,
    "zeros in place": _kept_zeros,
}


@pytest.mark.everyday(6)
@pytest.mark.parametrize("scene", SCENES)
def test_gradients_are_those_of_one_process(ranks: RankPool, scene: str) -> None:
    expected = _on_ranks(scene, 0)
    for found in ranks(2).run(_on_ranks, scene, 2):
        for mine, right in zip(found, expected, strict=True):
            _same(mine, right)
