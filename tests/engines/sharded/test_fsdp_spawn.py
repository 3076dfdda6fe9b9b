"""FSDP in spawned and forked processes, as in a notebook: the module goes there, and comes back whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.engines.table import make_strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.equivalence.models import Blocks, rows
from tests.loop.pieces import quiet


class Noted(Blocks):
    """It predicts, and keeps what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.head: nn.Linear | None = nn.Linear(1, 1)

    def losses(self, x: Tensor) -> Tensor:
        assert self.head is not None
        return torch.tanh(self.head(super().losses(x)[:, None])).squeeze(1).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch[0])


class MadeLate(Noted):
    """Its head is made in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            self.head = nn.Linear(1, 1)
        super().configure_model()


def used(module: Noted, strategy: Any) -> tuple[list[Tensor], list[float], int]:
    """Weights after two fits with a prediction between them; the predictions, and the steps that the module counted."""
    predicted = []
    for _ in range(2):
        trainer = quiet(strategy=strategy(), devices=2, max_epochs=1)
        trainer.seed = 5
        trainer.fit(module, rows(23)(2))
        found = trainer.predict(module, rows(7, shuffle=False)(2))
        predicted += [float(value) for batch in found for value in batch]
    return [parameter.detach() for parameter in module.parameters()], predicted, module.steps


def seeded(make: type[Noted]) -> Noted:
    torch.manual_seed(3)
    return make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "start"),
    [(MadeLate, FSDPStrategy, "spawn"), (Noted, partial(ModelParallelStrategy, 2, 1), "fork")],
)
def test_a_module_is_used_in_one_call_after_the_other(make: type[Noted], kind: Any, start: str) -> None:
    expected, numbers, steps = used(seeded(make), partial(DDPStrategy, start_method="fork"))
    found, same, counted = used(seeded(make), partial(kind, start_method=start))
    assert type(found[0]) is torch.Tensor
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert same == pytest.approx(numbers, rel=1e-4)
    assert len(same) == 14
    assert counted == steps


class ShardsItself(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Linear(6, 1)
            fully_shard(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
def test_layers_that_cannot_be_made_in_the_calling_process_are_an_error_after_the_run() -> None:
    trainer = quiet(strategy=FSDPStrategy(start_method="spawn"), devices=2, max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"The run has ended and returned the weights of ShardsItself"):
        trainer.fit(ShardsItself(), DataLoader(torch.randn(8, 6), batch_size=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload", "model_parallel"])
def test_where_there_is_no_script_the_name_spawns(name: str) -> None:
    """It was refused in a notebook, with "ddp_notebook" as the way out, which does not shard."""
    assert make_strategy(name, 2, interactive=True).launcher == "spawn"
    assert make_strategy(name, 2).launcher == "script"


def test_without_shards_the_start_is_the_same() -> None:
    found = FSDPStrategy(sharding_strategy="NO_SHARD", start_method="fork").instead
    assert found is not None
    assert isinstance(found, DDPStrategy)
    assert found.launcher == "fork"
    with pytest.raises(MisconfigurationException, match=r"FSDPStrategy\(start_method='thread'\) is not known"):
        FSDPStrategy(start_method="thread")


class OnMeta(LightningModule):
    """Layers on the meta device, made in ``__init__`` and in ``configure_model``."""

    def __init__(self, on_meta: bool = True) -> None:
        super().__init__()
        self.device_of_layers = "meta" if on_meta else "cpu"
        with torch.device(self.device_of_layers):
            self.first = nn.Linear(4, 8)
        self.rest: nn.Module | None = None

    def configure_model(self) -> None:
        if self.rest is None:
            with torch.device(self.device_of_layers):
                self.rest = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def loss(self, batch: Tensor) -> Tensor:
        assert self.rest is not None
        found: Tensor = self.rest(self.first(batch))
        return (found - 3).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("kind", [FSDPStrategy, DDPStrategy])
def test_layers_made_on_the_meta_device_come_back_with_what_they_have_learned(kind: Any) -> None:
    """They came back without values, and the next `validate` ran on fresh random weights."""
    torch.manual_seed(1)
    module, trainer = OnMeta(), quiet(strategy=kind(start_method="fork"), devices=2, max_epochs=2)
    data: Any = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))
    at_end = float(trainer.callback_metrics["v"])
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert trainer.validate(module, DataLoader(data, 4), verbose=False)[0]["v"] == pytest.approx(at_end, rel=1e-6)
    assert at_end < 5
