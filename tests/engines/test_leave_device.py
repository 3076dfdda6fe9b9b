"""After a call module and optimizer states are on the CPU again, as Lightning leaves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import LightningModule
from lockstep.engines.engine import states_to_cpu, states_to_parameters
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.types import TrainerStatus
from lockstep.loop.call import leave_device
from tests.loop.pieces import Slope, numbers, quiet

GPU = torch.device("cuda", 0)


class Steps(Slope):
    def validation_step(self, batch: Tensor) -> None:
        self.w * batch.sum()

    test_step = predict_step = validation_step


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_each_call_ends_with_the_module_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, called = Steps(), []
    monkeypatch.setattr(module, "cpu", lambda: called.append("cpu"))
    trainer = quiet(max_steps=2, limit_val_batches=0 if name == "fit" else 1)
    getattr(trainer, name)(module, numbers(2))
    assert called == ["cpu"]


def test_gradients_on_the_cpu_are_there_after_a_fit() -> None:
    module = Slope()
    quiet(max_steps=2).fit(module, numbers(2))
    assert module.w.grad is not None


class OnGpu(LightningModule):
    """Of fake tensors, which are not moved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, device=GPU))
        self.moved = False

    def cpu(self) -> Any:
        self.moved = True


@pytest.fixture
def fake() -> Any:
    with FakeTensorMode():
        yield


def session_of(strategy: Any, status: TrainerStatus = TrainerStatus.FINISHED, interruption: str | None = None) -> Any:
    return SimpleNamespace(strategy=strategy, state=SimpleNamespace(status=status), interruption=interruption)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("kind", [SingleDeviceStrategy, FSDPStrategy])
def test_nothing_of_a_fit_is_left_on_its_device(kind: type[Any]) -> None:
    strategy, module = kind(), OnGpu()
    optimizer = torch.optim.Adam(module.parameters())
    step = torch.empty(())
    optimizer.state[module.w] = {"step": step, "exp_avg": torch.empty(3, device=GPU)}
    module.w.grad = torch.empty(3, device=GPU)
    strategy.root_device, strategy.module, strategy.optimizers = GPU, module, [optimizer]
    leave_device(session_of(strategy))
    state = optimizer.state[module.w]
    whole = kind is SingleDeviceStrategy  # parts are where the next call wants them
    assert module.moved == whole
    assert state["exp_avg"].device.type == ("cpu" if whole else "cuda")
    assert state["step"] is step
    assert module.w.grad is None


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
