"""Lazy layers, which have no shape before their first forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule, callbacks
from lockstep.callbacks import ModelCheckpoint
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def rows() -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 2, generator=torch.Generator().manual_seed(1)), batch_size=2)  # type: ignore[arg-type]


class Lazy(LightningModule):
    """Lazy layers; ``first`` is a batch that goes through them in ``configure_model``."""

    def __init__(self, first: Any = None) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))

    def configure_model(self) -> None:
        if self.first is not None:
            torch.manual_seed(3)
            self.net.eval()(self.first)
            self.net.train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.first is None and batch_idx == 0:
            torch.manual_seed(3)
        return self.net(batch).float().pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", self.net(batch).float().pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def values(module: nn.Module) -> list[torch.Tensor]:
    return [value.detach() for value in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize(
    "flags",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "16-mixed"}, {"strategy": "auto"}],
)
def test_they_train_as_layers_that_have_seen_a_batch(flags: dict[str, Any]) -> None:
    """Not even on one device could they be trained."""
    lazy, built = Lazy(), Lazy(torch.zeros(2, 2))
    for module in (lazy, built):
        torch.manual_seed(3)
        assert quiet(max_epochs=2, **flags).fit(module, rows()).epochs == 2
    for one, other in zip(values(lazy), values(built), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_checkpoint_brings_the_shapes(tmp_path: Path) -> None:
    whole, rest, keeps = Lazy(), Lazy(), [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
    quiet(max_epochs=2, enable_checkpointing=True, callbacks=keeps, enable_model_summary=True).fit(whole, rows())
    path = tmp_path / "epoch=0.ckpt"
    assert quiet(max_epochs=2).fit(rest, rows(), ckpt_path=str(path)).global_step == 8
    for one, other in zip(values(whole), values(rest), strict=True):
        assert torch.equal(one, other)
    assert Lazy.load_from_checkpoint(path).net[0].weight.shape == (4, 2)


def test_validate_leaves_parameters_that_a_fit_can_train() -> None:
    """Made under `inference_mode`, they were inference tensors."""
    module, trainer = Lazy(), quiet(max_epochs=1)
    trainer.validate(module, rows(), verbose=False)
    assert trainer.fit(module, rows()).global_step == 4


def searched() -> None:
    from lockstep.tuner import Tuner

    Tuner(quiet(max_epochs=1)).lr_find(Lazy(), rows(), num_training=2, update_attr=False)


def fitted_by(callback: str, *arguments: Any) -> None:
    quiet(max_epochs=2, callbacks=[getattr(callbacks, callback)(*arguments)]).fit(Lazy(), rows())


NEEDS: dict[str, tuple[str, Callable[[], object]]] = {
    "A plan": ("balancing", lambda: quiet().plan(Lazy(), rows())),
    "ModelPruning": ("extras", lambda: fitted_by("ModelPruning", "l1_unstructured")),
    "EMAWeightAveraging": ("extras", lambda: fitted_by("EMAWeightAveraging")),
    "StochasticWeightAveraging": ("extras", lambda: fitted_by("StochasticWeightAveraging", 0.1)),
    "A search": ("extras", searched),
}
"""By name the extension of what needs shapes, and a use of it."""


@pytest.mark.parametrize(
    ("who", "use"),
    [pytest.param(who, use, marks=pytest.mark.extension(owner)) for who, (owner, use) in NEEDS.items()],
)
def test_who_needs_shapes_before_names_the_parameter_and_the_way_out(who: str, use: Callable[[], object]) -> None:
    with pytest.raises(MisconfigurationException, match=rf"{who}.*'net.0.weight'.*lazy layer.*configure_model"):
        use()


def refused(strategy: str) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        quiet(strategy=strategy, devices=2, max_epochs=1).fit(Lazy(), rows())
    return str(caught.value)


def trained(strategy: str) -> float:
    module = Lazy(torch.zeros(2, 2))
    if strategy == "fsdp":  # BatchNorm's statistics are synchronized there alone
        module.net[1] = nn.Identity()
    trainer = quiet(strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(module, rows())
    return trainer.fit_loop.progress.global_step


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("balanced", marks=pytest.mark.extension("balancing"))]
)
def test_ranks_refuse_them_by_name(ranks: RankPool, strategy: str) -> None:
    for said in ranks(2).run(refused, strategy):
        assert "'net.0.weight' belongs to a lazy layer" in said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_batch_in_configure_model_is_the_way_out(ranks: RankPool, strategy: str) -> None:
    assert ranks(2).run(trained, strategy) == [2, 2]
