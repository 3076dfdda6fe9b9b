"""Averaged weights over a run: what a module's hook does to a checkpoint, and the metrics of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from tests.checkpoint.test_sharded import Adam, fsdp, whole_of
from tests.engines import test_norms
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SAMPLES = torch.randn(16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(LightningModule):
    """A layer that learns to add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1).double()
        self.start = 0.0

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.loss(batch))

    def on_train_start(self) -> None:
        self.start = self.net.bias.item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Migrates(Net):
    """Renames a weight, takes a note away that older versions saved, and sets the bias."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.pop("note")
        weights = checkpoint["state_dict"]
        weights["net.bias"] = torch.full_like(weights["net.bias"], 100.0)


class MigratesBoth(Migrates):
    """Knows of the weights that the average is made of, as a script may that was written for Lightning."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        weights = checkpoint["current_model_state"]
        weights["net.bias"] = weights["net.bias"] + 1.0


def fit(net: Net, folder: Path, epochs: int, average: Any, **options: Any) -> ModelCheckpoint:
    keep = ModelCheckpoint(folder, "{epoch}", monitor="value", save_top_k=-1)
    trainer = quiet(max_epochs=epochs, callbacks=[average, keep], enable_checkpointing=True, num_sanity_val_steps=0)
    trainer.fit(net, DataLoader(SAMPLES, 4), DataLoader(SAMPLES, 16), **options)  # type: ignore[arg-type]
    return keep


@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_what_a_module_does_to_the_weights_of_a_checkpoint_reaches_those_that_train(make: Any, tmp_path: Path) -> None:
    """The average was migrated alone, and training went on with the weights as they had been."""
    fit(Migrates(), tmp_path, 2, make())
    path = str(tmp_path / "epoch=1.ckpt")
    trained = torch.load(path, weights_only=True)["current_model_state"]["net.bias"].item()
    for kind, expected in ((Migrates, 100.0), (MigratesBoth, trained + 1.0)):
        net = kind()
        fit(net, tmp_path / kind.__name__, 3, make(), ckpt_path=path)
        assert net.start == expected


@pytest.mark.parametrize(
    "settings",
    [{"update_every_n_steps": 0, "update_starting_at_epoch": 0}, {"update_starting_at_epoch": 2}, {}],
)
def test_the_metric_of_a_checkpoint_is_that_of_the_averaged_weights_in_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """An update at an epoch's end came between its validation and its checkpoint."""
    found = fit(Net(), tmp_path, 4, EMAWeightAveraging(decay=0.5, **settings)).best_k_models
    assert len(found) == 4
    for path, value in found.items():
        assert Net.load_from_checkpoint(path).loss(SAMPLES).item() == pytest.approx(value.item(), rel=1e-12)


def test_a_run_that_is_resumed_within_an_epoch_end_updates_once(tmp_path: Path) -> None:
    settings = {"decay": 0.5, "update_every_n_steps": 0, "update_starting_at_epoch": 0}
    whole, again = Net(), Net()
    fit(whole, tmp_path, 3, EMAWeightAveraging(**settings))
    fit(again, tmp_path / "again", 3, EMAWeightAveraging(**settings), ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert torch.equal(whole.net.weight, again.net.weight)


def averages(folder: str) -> bool:
    def fit(epochs: int, resume: str | None = None) -> Any:
        torch.manual_seed(5)
        trainer = quiet(
            strategy=fsdp(), devices=2, max_epochs=epochs, precision="64-true", callbacks=[WeightAveraging()]
        )
        trainer.fit(Adam(), rows(24)(4), ckpt_path=resume)
        return trainer

    fit(1).save_checkpoint(f"{folder}/averaged.ckpt")
    resumed, whole = whole_of(fit(2, f"{folder}/averaged.ckpt")), whole_of(fit(2))
    return all(torch.equal(resumed["weights"][name], value) for name, value in whole["weights"].items())


@pytest.mark.slow
def test_weight_averaging_resumes_from_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(averages, str(tmp_path), timeout=60) == [True, True]


def averaged_with_synchronized_norms(length: int, **flags: Any) -> dict[str, Tensor]:
    callback = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    module = test_norms.fit(
        test_norms.seeded(), length, max_epochs=3, callbacks=[callback], sync_batchnorm=True, **flags
    )[1]
    return module.state_dict()  # type: ignore[no-any-return]


def test_weights_averaged_over_epochs_get_the_statistics_of_one_process(ranks: RankPool) -> None:
    """The callback averages those of the ranks, where each has its own; here all have seen every batch."""
    expected = averaged_with_synchronized_norms(14, strategy="auto", devices=1, batch_size=12)
    for found in ranks(3).run(averaged_with_synchronized_norms, 14, timeout=40):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
