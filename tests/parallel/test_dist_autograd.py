"""torch.distributed.autograd, whose gradients lie in a context: they are averaged there, and ``.grad`` stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd, rpc

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.testing.pool import RankPool


@contextmanager
def _agent(folder: str) -> Iterator[None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


class Net(nn.Module):
    """Two layers; the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.second(self.first(x).tanh()) if both else self.first(x)


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _loss(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def _expected() -> list[Tensor]:
    net = Net()
    for rank in range(2):
        (_loss(net(_batch(rank))) / 2).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _backwards(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def gradients(model: nn.Module, **how: Any) -> list[Tensor]:
        with autograd.context() as context:
            outputs = model(_batch(rank), **how)
            torch.autograd.grad(outputs.sum(), list(model.parameters())[:1], retain_graph=True)  # no round
            loss = _loss(outputs)
            del outputs
            autograd.backward(context, [loss])
            given = autograd.get_gradients(context)
            return [given[p].clone() for p in model.parameters()]

    def largest_error(grads: list[Tensor], expected: list[Tensor]) -> float:
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, expected, strict=True))

    with _agent(folder):
        for views in (True, False):
            model = DistributedDataParallel(Net(), gradient_as_bucket_view=views)
            steps = []
            for _ in range(3):
                model.zero_grad()
                _loss(model(_batch(rank))).backward()
                before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                steps.append(largest_error(gradients(model), _expected()))
                after = [p.grad for p in model.parameters() if p.grad is not None]
                steps.append(largest_error(after, before))
            found[f"views={views}"] = (max(steps), model.reducer.rounds)
        with model.no_sync():
            alone = gradients(model)
        found["no_sync"] = (largest_error(alone, _expected()) > 1e-3, model.reducer.rounds)
        with autograd.context():
            model.zero_grad()
            _loss(model(_batch(rank))).backward()
        local = [p.grad for p in model.parameters() if p.grad is not None]
        found["loss.backward() in a context"] = (largest_error(local, _expected()), model.reducer.rounds)
        with autograd.context() as context:
            loss = _loss(model(_batch(rank), both=rank == 0))
            found["one rank"] = _said(lambda: autograd.backward(context, [loss]))
        model = DistributedDataParallel(Net(), static_graph=True)
        found["static"] = _said(lambda: gradients(model))
    return found


def test_gradients_in_a_context_are_averaged(ranks: RankPool, tmp_path: Path) -> None:
    """They were left as each rank had them, without a word."""
    for rank, found in enumerate(ranks(2).run(_backwards, str(tmp_path), timeout=60)):
        for views in (True, False):
            error, rounds = found[f"views={views}"]
            assert error <= 1e-12
            assert rounds == 6
        assert found["no_sync"] == (True, 6)
        error, rounds = found["loss.backward() in a context"]
        assert error <= 1e-12
        assert rounds == 7
        assert ("'second.weight' got a gradient on other ranks only" in found["one rank"]) == (rank == 1)
        assert "take static_graph=False" in found["static"]
