"""Complex parameters, buffers and batches in every precision, and over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.precision.formats import make_precision
from lockstep.strategies import DDPStrategy
from lockstep.testing import check_equivalence
from tests.loop.pieces import quiet
from tests.tools.hooked import hooked
from tests.tools.pool import RankPool


class Waves(LightningModule):
    """A complex layer, whose loss needs both parts of everything complex."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.v = nn.Parameter(torch.randn(3))
        self.register_buffer("phase", torch.tensor([1j, 1.0, 0.3 - 2j], dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = (batch[0] @ self.w) * self.phase
        return (out.abs().square() * self.v).mean() + out.real.mean() + out.imag.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def rows(batch_size: int) -> Any:
    x = torch.randn(23, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x), batch_size, shuffle=True)


KINDS = {
    "64-true": torch.complex128,
    "32-true": torch.complex64,
    "bf16-mixed": torch.complex64,
    "bf16-true": torch.complex64,  # torch has no complex numbers of 16 bits to compute with
    "16-true": torch.complex64,
}


@pytest.mark.parametrize("name", KINDS)
def test_complex_tensors_keep_both_parts(name: str) -> None:
    """Under the true precisions no more than their real parts were left, of parameters and of buffers."""
    precision, module = make_precision(name), Waves()
    before = module.w.detach().clone(), module.phase.clone()
    assert precision.convert_module(module) is module
    assert (module.w.dtype, module.phase.dtype) == (KINDS[name], KINDS[name])
    assert isinstance(module.w, nn.Parameter)
    assert module.w.requires_grad
    assert torch.equal(module.w.detach().to(torch.complex64), before[0])
    assert torch.equal(module.phase.to(torch.complex64), before[1])
    z = torch.ones(2, dtype=torch.complex64) * 1j
    converted = z if precision.convert_input is None else precision.convert_input({"z": z})["z"]
    assert converted.dtype == KINDS[name]
    assert torch.equal(converted.to(torch.complex64), z)


ENGINES: dict[str, dict[str, Any]] = {
    "in shared memory": {},
    "over TCP": {"shared_memory": False},
    "static graph": {"static_graph": True},
    "without views": {"gradient_as_bucket_view": False},
    "sharded optimizer": {"shard_optimizer": True},
    **hooked("communication hook"),
    "check_reduction": {"check_reduction": True},
}
FLAGS: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.5},
    {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate": 2},
]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_complex_gradients_are_those_of_one_process(ranks: RankPool, world: int) -> None:
    def reports() -> list[str]:
        found = [
            check_equivalence(Waves, rows, strategy=DDPStrategy(**options), devices=world, **flags)
            for options in ENGINES.values()
            for flags in FLAGS
        ]
        return [str(report) for report in found if not report]

    assert ranks(world).run(reports, group=False, timeout=50) == [[]] * world


def test_clipping_by_value_bounds_both_parts() -> None:
    """It was refused within torch, as clamp is not there for complex numbers."""
    found: list[Tensor] = []

    class Clipped(Waves):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(torch.view_as_real(self.w.grad).abs().max())

    flags: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_steps": 2}
    quiet(precision="64-true", **flags).fit(Clipped(), rows(4))
    assert found == [0.01, 0.01]
