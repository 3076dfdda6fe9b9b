"""ModelCheckpoint that saves by steps or time and ranks by a validation: the value is that of the weights."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import ModelCheckpoint
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Measured(Slope):
    """Its validation logs the step at which it runs, or a value by it."""

    def __init__(self, values: dict[int, float] | None = None) -> None:
        super().__init__(lr=0.1)
        self.values = values or {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.log("v", self.values.get(step, float(step)))


def pairs(folder: Path) -> dict[int, int]:
    """The value by the step, of the names of files."""
    return dict(tuple(map(int, path.stem.split("-"))) for path in folder.iterdir())  # type: ignore[misc]


@pytest.mark.parametrize("when", [{}, {"every_n_train_steps": 2}, {"train_time_interval": timedelta(0)}])
def test_a_value_of_a_validation_that_is_turned_off_is_not_missed(when: Any, tmp_path: Path) -> None:
    """It ended the fit with an error behind its first epoch, or its second step."""
    keep = ModelCheckpoint(tmp_path, monitor="v", save_last=True, **when)
    with pytest.warns(UserWarning, match="limit_val_batches=0 disables the validation"):
        result = quiet(max_epochs=2, limit_val_batches=0, enable_checkpointing=True, callbacks=[keep]).fit(
            Measured(), numbers(8, 2), numbers(2)
        )
    assert result.stopped == "max_epochs=2 reached"
    assert (keep.best_model_path, keep.best_k_models) == ("", {})
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def fit(folder: Path, steps: int, start: Any = quiet, **flags: Any) -> ModelCheckpoint:
    name = "{step}-{v:.0f}"
    keep = ModelCheckpoint(
        folder, name, "v", mode="max", save_top_k=-1, every_n_train_steps=steps, auto_insert_metric_name=False
    )
    start(max_epochs=2, enable_checkpointing=True, num_sanity_val_steps=0, callbacks=[keep], **flags).fit(
        Measured(), numbers(16, 2), numbers(2)
    )
    return keep


@pytest.mark.parametrize(
    ("flags", "steps", "saved"),
    [
        ({"val_check_interval": 4}, 4, [4, 8, 12, 16]),
        ({"val_check_interval": 0.25}, 2, range(2, 17, 2)),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 3, range(3, 16, 3)),
        ({"val_check_interval": 4, "accumulate_grad_batches": 2}, 2, [2, 4, 6, 8]),
        ({}, 8, [8, 16]),
        ({"check_val_every_n_epoch": 2}, 16, [16]),
        ({"max_steps": 8, "val_check_interval": 4}, 4, [4, 8]),
    ],
)
def test_a_save_waits_for_the_validation_that_is_due(flags: Any, steps: int, saved: Any, tmp_path: Path) -> None:
    """Weights of step 12 carried the value of step 8, and the best weights were deleted."""
    keep = fit(tmp_path, steps, **flags)
    assert pairs(tmp_path) == {step: step for step in saved}
    assert keep.values_of_earlier_steps == {}


def on_two(folder: Path) -> dict[int, int]:
    fit(folder, 2, on_ranks, val_check_interval=2)
    return pairs(folder)


def test_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(on_two, tmp_path) == [{step: step for step in (2, 4, 6, 8)}] * 2


def test_a_value_of_earlier_weights_is_told_and_deletes_no_better_ones(tmp_path: Path) -> None:
    """Validations at 4, 8, 12, saves at 6 and 12: the file of step 6 has the value of step 4."""
    keep = ModelCheckpoint(tmp_path, "{step}", "v", mode="max", save_top_k=1, every_n_train_steps=6)
    trainer = quiet(max_epochs=3, enable_checkpointing=True, callbacks=[keep], val_check_interval=4)
    values = {4: 9.0, 8: 1.0, 12: 2.0, 16: 8.0, 20: 1.0, 24: 1.0}
    with pytest.warns(UserWarning, match=r"checkpoint of step 6 is ranked by the value of 'v' from step 4"):
        trainer.fit(Measured(values), numbers(8), numbers(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step=12.ckpt"]  # neither 6, with 9, nor 18, with 8
    assert keep.best_model_score == 2.0


def test_so_it_is_after_a_resume(tmp_path: Path) -> None:
    def trainer(keep: ModelCheckpoint, steps: int) -> Any:
        return quiet(
            max_epochs=4, max_steps=steps, enable_checkpointing=True, callbacks=[keep], check_val_every_n_epoch=2
        )

    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", "v", mode="max", save_top_k=-1, every_n_train_steps=5)

    trainer(checkpoint(), 10).fit(Measured(), numbers(4), numbers(1))
    keep = checkpoint()
    trainer(keep, 11).fit(Measured(), numbers(4), numbers(1), ckpt_path=str(tmp_path / "step=10.ckpt"))
    assert keep.values_of_earlier_steps == {str(tmp_path / "step=10.ckpt"): 8}


@pytest.mark.parametrize("how", [{"every_n_train_steps": 2}, {"train_time_interval": timedelta(seconds=0)}])
def test_before_the_first_validation_no_save_ends_the_fit(how: Any, tmp_path: Path) -> None:
    """Without a sanity check nobody knew yet that there were validation batches."""
    keep = ModelCheckpoint(tmp_path, "{step}", "v", **how)
    flags = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    quiet(max_epochs=4, enable_checkpointing=True, callbacks=[keep], **flags).fit(Measured(), numbers(4), numbers(1))
    assert Path(keep.best_model_path).name == "step=8.ckpt"


class TrainingMean(Measured):
    """Logs the epoch's mean of its training, by which it is ranked."""

    def __init__(self, means: dict[int, float]) -> None:
        super().__init__()
        self.means = means

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", self.means[self.trainer.current_epoch], on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


BY_STEPS = {"every_n_train_steps": 2}


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        (BY_STEPS, {}),
        (BY_STEPS, {"val_check_interval": 2}),
        (BY_STEPS, {"limit_val_batches": 0}),
        ({"every_n_epochs": 1}, {}),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, {}),
    ],
)
def test_a_save_at_an_epoch_s_end_waits_for_the_mean_of_its_training(how: Any, flags: Any, tmp_path: Path) -> None:
    """Weights of step 6 were ranked by the mean of the first epoch, and those of step 8, the best, by it, too."""
    keep = ModelCheckpoint(tmp_path, "{step}-{train:.0f}", "train", save_top_k=2, auto_insert_metric_name=False, **how)
    trainer = quiet(max_epochs=3, enable_checkpointing=True, num_sanity_val_steps=0, callbacks=[keep], **flags)
    trainer.fit(TrainingMean({0: 9.0, 1: 3.0, 2: 5.0}), numbers(4), numbers(1))
    assert pairs(tmp_path) == {8: 3, 12: 5}
    assert keep.values_of_earlier_steps == {}
    assert keep.best_model_path.endswith("8-3.ckpt")
