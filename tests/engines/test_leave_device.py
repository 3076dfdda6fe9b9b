"""After a call module and optimizer states are on the CPU again, as Lightning leaves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.engines.engine import states_to_cpu, states_to_parameters
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.types import TrainerStatus
from lockstep.loop.call import leave_device
from tests.loop.pieces import Slope, numbers, quiet

GPU = torch.device("cuda", 0)


def test_gradients_on_the_cpu_are_there_after_a_fit() -> None:
    module = Slope()
    quiet(max_steps=2).fit(module, numbers(2))
    assert module.w.grad is not None


@pytest.fixture
def fake() -> Any:
    with FakeTensorMode():
        yield


def session_of(strategy: Any, status: TrainerStatus = TrainerStatus.FINISHED, interruption: str | None = None) -> Any:
    return SimpleNamespace(strategy=strategy, state=SimpleNamespace(status=status), interruption=interruption)


@pytest.mark.usefixtures("fake")
def test_the_same_optimizer_in_another_fit_has_its_states_beside_the_parameters() -> None:
    parameter = nn.Parameter(torch.empty(3, device=GPU))
    lists, single = [torch.empty(3, device=GPU)], torch.empty((), device=GPU)
    optimizer = torch.optim.LBFGS([parameter])
    optimizer.state[parameter] = {"old_dirs": lists, "ro": single, "n_iter": 4}
    states_to_cpu(optimizer)
    assert optimizer.state[parameter]["old_dirs"][0].device.type == "cpu"
    assert optimizer.state[parameter]["ro"] is single
    states_to_parameters(optimizer)
    assert optimizer.state[parameter]["old_dirs"][0].device == GPU
    assert optimizer.state[parameter]["n_iter"] == 4


@pytest.mark.parametrize(
    ("status", "interruption", "ranks", "leaves"),
    [
        (TrainerStatus.FINISHED, None, 2, True),
        (TrainerStatus.INTERRUPTED, "Ctrl-C", 2, True),
        (TrainerStatus.INTERRUPTED, None, 1, True),
        (TrainerStatus.INTERRUPTED, None, 2, False),  # a collective may be under way that never ends
    ],
)
def test_a_device_on_which_a_rank_was_lost_is_not_waited_for(
    status: TrainerStatus, interruption: str | None, ranks: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, called = Slope(), []
    strategy = SingleDeviceStrategy()
    strategy.module = module
    monkeypatch.setattr(SingleDeviceStrategy, "world_size", ranks)
    monkeypatch.setattr(module, "cpu", lambda: called.append(True))
    leave_device(session_of(strategy, status, interruption))
    assert called == [True] * leaves


def test_a_device_that_has_failed_does_not_hide_the_first_error() -> None:
    class Broken(Slope):
        def training_step(self, batch: Tensor) -> Tensor:
            raise ValueError("first")

        def cpu(self) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(ValueError, match="first"):
        quiet(max_steps=1).fit(Broken(), numbers(1))
