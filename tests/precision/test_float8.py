"""fp8-mixed: linear layers multiply in float8, on a CPU by emulation; where it cannot be, that is said."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision import formats
from lockstep.precision.formats import make_precision
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def test_without_torchao_it_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match=r"needs torchao, which is not installed.*pip install torchao"):
        make_precision("fp8-mixed")


def test_a_gpu_without_float8_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(
        MisconfigurationException, match=r"NVIDIA A100 has compute capability 8\.0, but float8 needs 8\.9"
    ):
        make_precision("fp8-mixed", "cuda")
    with pytest.raises(MisconfigurationException, match="on 'mps'"):
        make_precision("fp8-mixed", "mps")


class Net(LightningModule):
    """Of three linear layers two have sizes that float8 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 16), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch).float() - batch.mean(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def change(precision: str, strategy: str = "auto", accelerator: str = "cpu") -> tuple[Tensor, list[str]]:
    """Of the weights in six steps, in one vector; and the classes of the layers."""
    torch.manual_seed(3)
    module = Net()
    before = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    world = 2 if strategy == "fsdp" else 1
    trainer = quiet(strategy=strategy, devices=world, max_epochs=1, precision=precision, accelerator=accelerator)
    trainer.seed = 5
    data: Any = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, 16 // world))
    after = torch.cat([value.flatten().cpu() for _, value, _ in trainer.strategy.whole_parameters()])
    return after - before, [type(layer).__name__ for layer in module.net]


def check(accelerator: str) -> None:
    whole, _ = change("32-true", accelerator=accelerator)
    half, _ = change("bf16-mixed", accelerator=accelerator)
    found, layers = change("fp8-mixed", accelerator=accelerator)
    assert layers == ["Float8Linear", "LayerNorm", "Tanh", "Float8Linear", "Linear"]
    # e4m3 rounds to 2**-4, e5m2, which gradients have, to 2**-3; bfloat16 to 2**-9
    assert (half - whole).norm() < (found - whole).norm() < 2**-3 * whole.norm()


def test_the_numbers_are_those_of_float32_to_the_rounding_of_float8(ranks: RankPool) -> None:
    pytest.importorskip("torchao")
    check("cpu")
    alone, _ = change("fp8-mixed")
    for found, layers in ranks(2).run(change, "fp8-mixed", "fsdp"):
        assert layers[0] == "Float8Linear"
        # each rank scales its own samples' gradients
        assert (found - alone).norm() < 2**-3 * alone.norm()


class Layers(nn.Module):
    """Two that stand for torchao's, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        kind = type("Float8Linear", (nn.Linear,), {})
        self.layers = nn.ModuleList([kind(4, 4), kind(4, 4), nn.Linear(4, 4)])

    def compiled(self) -> list[bool]:
        return [layer._compiled_call_impl is not None for layer in self.layers]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there, and a torchao that converts nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(formats, "find_spec", lambda name: True)
    config = SimpleNamespace(from_recipe_name=lambda name: Config())
    fake = SimpleNamespace(Float8LinearConfig=config, convert_to_float8_training=lambda module, **options: module)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=fake))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)


@dataclass
class Config:
    emulate: bool = False
    pad_inner_dim: bool = False


@pytest.mark.usefixtures("on_a_gpu")
def test_converted_layers_are_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it fp8-mixed was slower than bf16-mixed, and nothing said so."""
    monkeypatch.setattr(formats, "has_triton", lambda: True)
    module = Layers()
    make_precision("fp8-mixed", "cuda").convert_module(module)
    assert module.compiled() == [True, True, False]


@pytest.mark.gpu
def test_the_numbers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(inductor, "compile_threads", 1)  # no processes that would outlive the test
    if torch.cuda.get_device_capability() < formats.FLOAT8:
        pytest.skip("needs a GPU that multiplies in float8")
    check("gpu")
