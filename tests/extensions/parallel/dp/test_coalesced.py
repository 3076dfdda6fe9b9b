"""Replicas on other devices: parameters are copied together, and gradients come back in one order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.extensions.parallel.dp.coalesced import CopiesOfAll, copy_tensors
from lockstep.extensions.parallel.dp.replicas import replicate
from tests.loop.pieces import Slope, numbers, quiet

CPU, META = torch.device("cpu"), torch.device("meta")


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_small_tensors_travel_together() -> None:
    tensors = [torch.full((n % 7 + 1, 3), float(n)) for n in range(300)]
    tensors += [torch.ones(2**19), torch.arange(5), torch.ones(3, dtype=torch.float64), torch.ones(4).to_sparse()]
    with Calls() as calls:
        there = copy_tensors(tensors, META)
    assert [(t.shape, t.dtype, t.device) for t in there] == [(t.shape, t.dtype, META) for t in tensors]
    assert calls.count["aten._to_copy.default"] == 5  # the float32 ones, a large one, one of each other kind
    back = copy_tensors(tensors, CPU)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(back, tensors, strict=True))


def test_gradients_are_summed_in_the_order_of_the_devices() -> None:
    """Not in that of their arrival: the sum of these depends on it. What no replica has used gets none."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    copies = CopiesOfAll.apply([CPU] * 3, *parameters)
    first, second, third = 1.0, 1e8, -1e8
    loss = (copies[6] * third).sum() + (copies[0] * first).sum() + (copies[3] * second).sum() + (copies[4] * 2).sum()
    loss.backward()
    one = torch.tensor([first])
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, one + second + third)
    assert not torch.equal(parameters[0].grad, (third + one * 0) + second + first)
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == [2.0]
    assert parameters[2].grad is None


def test_a_replica_elsewhere_has_copies_of_everything() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    net.append(net[0])
    same, here, there = replicate(net, [CPU, CPU, META])
    assert same is net
    assert here[0].weight is net[0].weight
    assert here[1].running_mean is not net[1].running_mean
    assert {t.device for t in there.state_dict(keep_vars=True).values()} == {META}
    assert there[0].weight is there[3].weight
    assert type(there[0].weight.grad_fn).__name__ == "CopiesOfAllBackward"
    assert there[0].weight.grad_fn is there[1].bias.grad_fn
    assert not there[2].weight.requires_grad
    with torch.no_grad():
        *_, there = replicate(net, [CPU, META])
    assert not there[0].weight.requires_grad


class Logs(Slope):
    def training_step(self, batch: Tensor) -> Tensor:
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        self.log("twice", loss.detach() * 2)
        return loss


def test_logged_values_are_not_waited_for_before_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("cpu", "backward"):
        own = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            order.append(name)
            return own(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, noted)
    trainer = quiet(strategy="dp", devices=2, max_steps=2)
    trainer.fit(Logs(), numbers(8, batch_size=4))
    assert order[0] == "backward"
    assert trainer.callback_metrics["twice"] == 0
