"""The contract of precisions, one row for each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import Callback
from lockstep.precision.formats import PRECISIONS, make_precision, precision_name
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import quiet

# name: dtype of parameters, of floating inputs, of a product inside the context, of torch.zeros(1) inside it
CONTRACT = {
    "64-true": (torch.float64, torch.float64, torch.float64, torch.float64),
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.float32, torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16, torch.float16, torch.float16),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str) -> None:
    parameters, inputs, products, zeros = CONTRACT[name]
    precision = make_precision(name)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    converted = precision.convert_module(module)
    assert converted is module
    assert {p.dtype for p in module.parameters()} == {parameters}
    assert module[1].num_batches_tracked.dtype == torch.int64

    batch: Any = {"x": torch.ones(4, 3), "labels": torch.arange(4), "names": ["a"]}
    if precision.convert_input is not None:
        batch = precision.convert_input(batch)
    assert batch["x"].dtype == inputs
    assert batch["labels"].dtype == torch.int64
    assert batch["names"] == ["a"]

    with precision.context() if precision.context is not None else nullcontext():
        assert module[0](batch["x"]).dtype == products
        assert torch.zeros(1).dtype == zeros
    assert torch.get_default_dtype() == torch.float32
    assert (precision.name, precision.scaler, precision.state_dict()) == (name, None, {})


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        (64, "64-true"),
        (16, "16-mixed"),
        ("bf16", "bf16-mixed"),
        *[(name, name) for name in PRECISIONS],
    ],
)
def test_names_and_aliases(flag: Any, name: str) -> None:
    assert precision_name(flag) == name


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_is_refused_where_torch_has_no_autocast(name: str) -> None:
    """What the device lacks decides, not its name: 16-mixed was for CUDA and CPUs alone."""
    with pytest.raises(MisconfigurationException, match=rf"precision='{name}'.*on 'meta' devices. Use precision='"):
        make_precision(name, "meta")
    assert make_precision(name, "mps").name == name
    assert make_precision(name, "xpu").name == name


def test_double_precision_is_refused_where_the_device_has_none() -> None:
    with pytest.raises(MisconfigurationException, match=r"'64-true' .* 'mps' devices.* Use precision='32-true'"):
        make_precision("64-true", "mps")


def test_16_mixed_has_a_scaler_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    # the scaler touches the device at the first loss only; without one torch switches it off with a warning
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    precision = make_precision("16-mixed", "cuda")
    assert precision.scaler is not None
    assert precision.context is not None
    state = precision.state_dict()
    assert state["scale"] == 2.0**16
    precision.load_state_dict({**state, "scale": 8.0})
    assert precision.state_dict()["scale"] == 8.0


def test_a_weight_used_under_no_grad_first_still_gets_its_gradient() -> None:
    """With autocast's cache the second forward took the cast weight of the first, which has no graph."""
    precision = make_precision("bf16-mixed")
    layer = nn.Linear(3, 2)
    assert precision.context is not None
    with precision.context():
        with torch.no_grad():
            layer(torch.ones(1, 3))
        loss = layer(torch.ones(1, 3)).sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


class Thirds(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.w * batch / 3).square().sum() - (self.w / 7).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class SavesInTheMiddle(Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_a_resume_in_double_goes_on_with_all_bits(tmp_path: Any) -> None:
    """Weights were loaded into a module that was still in float32, and rounded to it."""
    path = tmp_path / "double.ckpt"
    flags: dict[str, Any] = {"precision": "64-true", "max_epochs": 1}
    data = torch.linspace(0.1, 2, 8).unsqueeze(1)
    whole, rest = Thirds(), Thirds()
    quiet(**flags, callbacks=[SavesInTheMiddle(path)]).fit(whole, DataLoader(data))
    quiet(**flags).fit(rest, DataLoader(data), ckpt_path=path)
    saved = torch.load(path)["state_dict"]["w"]
    assert not torch.equal(saved, saved.float().double())
    assert rest.w.tolist() == whole.w.tolist()
