"""LightningModule written as ONNX: what the files compute is what the module computes."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        self.example_input_array = torch.arange(12.0).reshape(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.layer(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(torch.ones(1, 4)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected(module: Net) -> Tensor:
    return torch.tanh(module.layer(module.example_input_array)).detach()


def test_torchscript_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"Net\.to_torchscript\(\): .*use torch\.export\.export"):
        Net().to_torchscript("net.pt", method="trace")


@pytest.mark.filterwarnings("ignore")
def test_an_export_needs_an_input() -> None:
    pytest.importorskip("onnx")
    module = Net()
    module.example_input_array = None
    with pytest.raises(MisconfigurationException, match=r"Net\.to_onnx.*set `self.example_input_array`"):
        module.to_onnx(dynamo=False)


def test_the_input_comes_as_a_batch_would() -> None:
    class Doubled(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return 2 * batch

    module = Doubled()
    assert torch.equal(module._sample(None), 2 * module.example_input_array)
    assert torch.equal(module._sample(torch.ones(1)), 2 * torch.ones(1))


def computed(model: Any, module: Net) -> Tensor:
    reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
    (found,) = reference.run(None, {reference.input_names[0]: module.example_input_array.numpy()})
    return torch.from_numpy(found)


@pytest.mark.filterwarnings("ignore")
def test_onnx_computes_the_same(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    module, buffer = Net(), io.BytesIO()
    program = module.to_onnx(tmp_path / "net.onnx")
    module.to_onnx(buffer)
    assert type(program).__name__ == "ONNXProgram"
    assert module.training
    for model in (str(tmp_path / "net.onnx"), onnx.load_from_string(buffer.getvalue())):
        torch.testing.assert_close(computed(model, module), expected(module))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to_file", [True, False])
def test_onnx_by_the_exporter_of_old(to_file: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    module, buffer, path = Net(), io.BytesIO(), tmp_path / "net.onnx"
    module.to_onnx(path if to_file else buffer, module.example_input_array, dynamo=False)
    model = str(path) if to_file else onnx.load_from_string(buffer.getvalue())
    torch.testing.assert_close(computed(model, module), expected(module))


def test_what_is_not_installed_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.module.find_spec", lambda name: importlib.util.find_spec("a_package_that_nobody_has"))
    with pytest.raises(
        ModuleNotFoundError, match=r'Net.to_onnx\(\) needs the package `onnx`.*"torch-lockstep\[onnx\]"'
    ):
        Net().to_onnx()


def test_tensorrt_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"to_tensorrt.*to_onnx\(path\)"):
        Net().to_tensorrt("net.ts")
