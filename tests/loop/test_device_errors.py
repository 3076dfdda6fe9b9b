"""Errors that come of devices name the line, the tensor or the layer, and the way out; no such device is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import LightningModule
from lockstep.loop.raw_errors import in_words


class OnCuda(nn.Module):
    """A layer that is on a device; without gradients, for which autograd would want a driver."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(2, 2, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)  # type: ignore[arg-type]


class Scaled(LightningModule):
    """Its scale is a plain attribute, which nobody moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.scale = torch.ones(2)

    def by_attribute(self, x: Tensor) -> Tensor:
        return x * self.scale

    def by_variable(self, x: Tensor) -> Tensor:
        noise = torch.zeros(2)
        return x + noise

    def by_layer(self, x: Tensor) -> Tensor:
        return self.net(torch.zeros(1, 2))  # type: ignore[no-any-return]


def told(module: LightningModule, call: Callable[[], object], kind: str = "cuda") -> str:
    """What an error says that ``call`` raises, where the module is on a device."""
    with patch.object(type(module), "device", new_callable=PropertyMock, return_value=torch.device(kind)):
        try:
            call()
        except RuntimeError as error:
            in_words(module, "SingleDeviceStrategy", error)
            return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("step", "source", "name"),
    [
        ("by_attribute", "return x * self.scale", "on the CPU is self.scale"),
        ("by_variable", "return x + noise", "noise"),
        ("by_layer", "return nn.functional.linear(x, self.weight)", "on the CPU is x"),
    ],
)
def test_a_tensor_that_was_left_on_the_cpu_is_named_with_its_line(step: str, source: str, name: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        module = Scaled()
        module.net[0] = OnCuda()
        x = torch.ones(1, 2, device="cuda")
        said = told(module, lambda: getattr(module, step)(x))
    assert said.startswith(f"Scaled: {__file__}:")
    assert f"`{source}" in said
    assert name in said
    assert "device=self.device" in said
    assert "register_buffer" in said


def raising(text: str, kind: type[RuntimeError] = NotImplementedError) -> type[nn.Module]:
    class Lacking(nn.Module):
        def forward(self, x: Tensor) -> Any:
            raise kind(text)

    return Lacking


MPS = "The operator 'aten::lgamma' is not currently implemented for the MPS device. If you want this op to be added"
PRIVATE = "Could not run 'aten::lgamma' with arguments from the 'PrivateUse1' backend. This could be because"
HALF = "\"lgamma_cpu\" not implemented for 'Half'"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (MPS, "mps", "has no 'aten::lgamma' on 'mps' devices, which layer 'net.1' (Lacking) calls"),
        (PRIVATE, "xpu", "has no 'aten::lgamma' on 'xpu' devices, which layer 'net.1' (Lacking) calls"),
        (HALF, "cpu", "has no 'lgamma_cpu' for Half on 'cpu' devices, which layer 'net.1' (Lacking) calls"),
    ],
)
def test_an_operation_that_a_device_lacks_is_named_with_the_layer(text: str, kind: str, says: str) -> None:
    module = Scaled()
    module.net[1] = raising(text)()
    said = told(module, lambda: module.net(torch.ones(1, 2)), kind)
    assert says in said
    assert f"({__file__}:" in said
    assert ("PYTORCH_ENABLE_MPS_FALLBACK" in said) == (kind == "mps")
    assert ('accelerator="cpu"' in said) == (kind != "cpu")


def test_an_operation_of_the_backward_has_no_layer() -> None:
    def backward() -> None:
        raise NotImplementedError(MPS)

    assert "which a backward or the optimizer needs" in told(Scaled(), backward, "mps")


@pytest.mark.parametrize("text", ["Could not run 'aten::add' with arguments from the 'SparseCUDA' backend.", "other"])
def test_other_errors_stay_as_they_are(text: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    assert told(Scaled(), fail) == text


class Mute(RuntimeError):
    def __str__(self) -> str:
        return str(self.detail)  # type: ignore[attr-defined]  # of another process, which has pickled it


def test_an_error_that_cannot_say_what_it_is_stays_the_one() -> None:
    """A fit raised what its `__str__` raised."""
    in_words(Scaled(), "ddp", Mute("lost"))
