"""EarlyStopping: when it stops, why, and what it remembers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from lockstep.utilities.exceptions import MisconfigurationException
from tests.callbacks.fake_trainer import FakeTrainer


def run(stopper: EarlyStopping, values: list[float], **settings: object) -> FakeTrainer:
    """A fit in which ``loss`` takes these values, one an epoch."""
    trainer = FakeTrainer([stopper], max_epochs=len(values), num_training_batches=1, **settings)  # type: ignore[arg-type]

    def step(trainer: FakeTrainer, batch_idx: int) -> None:
        trainer.callback_metrics["loss"] = torch.tensor(values[trainer.current_epoch])

    trainer.fit(nn.Linear(1, 1), step)
    return trainer


@pytest.mark.parametrize(
    ("settings", "values", "epoch"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1, 1], 5),
        ({"patience": 0}, [3, 2, 2, 1], 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 2, 9], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 1, 1], 2),
        ({"patience": 9}, [5, 4, 3], None),
    ],
)
def test_patience_counts_checks_without_improvement(settings: dict, values: list, epoch: int | None) -> None:
    stopper = EarlyStopping("loss", **settings)
    trainer = run(stopper, values)
    assert trainer.should_stop == (epoch is not None)
    if epoch is not None:
        assert stopper.stopped_epoch == epoch
        assert stopper.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
        assert "loss did not improve" in str(stopper.stopping_reason_message)


@pytest.mark.parametrize(
    ("settings", "values", "reason", "text"),
    [
        ({"stopping_threshold": 1.0}, [3, 1, 0.9, 5], "STOPPING_THRESHOLD", "threshold 1.0"),
        ({"divergence_threshold": 9.0}, [3, 9, 9.5], "DIVERGENCE_THRESHOLD", "threshold 9.0"),
        ({"mode": "max", "stopping_threshold": 0.9}, [0.1, 0.9, 0.95], "STOPPING_THRESHOLD", "threshold 0.9"),
        ({"mode": "max", "divergence_threshold": 0.1}, [0.5, 0.1, 0.05], "DIVERGENCE_THRESHOLD", "threshold 0.1"),
        ({}, [3, 2, math.nan], "NON_FINITE_METRIC", "not finite; the best value was 2"),
        ({}, [3, 2, math.inf], "NON_FINITE_METRIC", "not finite"),
    ],
)
def test_thresholds_and_non_finite_values_stop_at_once(settings: dict, values: list, reason: str, text: str) -> None:
    stopper = EarlyStopping("loss", **settings)
    trainer = run(stopper, values)
    assert trainer.should_stop
    assert (stopper.stopping_reason, stopper.stopped_epoch) == (EarlyStoppingReason[reason], 2)
    assert text in str(stopper.stopping_reason_message)


def test_without_check_finite_a_nan_is_no_improvement() -> None:
    stopper = EarlyStopping("loss", check_finite=False, patience=2)
    trainer = run(stopper, [3, math.nan, 2, math.nan, math.nan, 1])
    assert trainer.should_stop
    assert stopper.stopped_epoch == 4
    assert stopper.best_score == 2


@pytest.mark.parametrize(
    ("given", "settings", "checks"),
    [
        (None, {}, ["epoch"] * 2),
        (None, {"val_check_interval": 0.5}, ["validation"] * 2),
        (None, {"check_val_every_n_epoch": 2}, ["validation"] * 2),
        (True, {"check_val_every_n_epoch": 2}, ["epoch"] * 2),
        (False, {}, ["validation"] * 2),
    ],
)
def test_where_it_checks(given: bool | None, settings: dict, checks: list[str]) -> None:
    seen = []

    class Spy(EarlyStopping):
        where = ""

        def on_train_epoch_end(self, *args: object) -> None:
            self.where = "epoch"
            super().on_train_epoch_end(*args)  # type: ignore[arg-type]

        def on_validation_end(self, *args: object) -> None:
            self.where = "validation"
            super().on_validation_end(*args)  # type: ignore[arg-type]

        def _check(self, trainer: object) -> None:
            seen.append(self.where)

    run(Spy("loss", check_on_train_epoch_end=given), [3, 2], **settings)
    assert seen == checks


def test_a_metric_that_was_never_logged() -> None:
    with pytest.raises(MisconfigurationException, match=r"conditioned on metric 'accuracy'.*Logged so far: 'loss'"):
        run(EarlyStopping("accuracy"), [1.0])
    assert not run(EarlyStopping("accuracy", strict=False), [1.0]).should_stop


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="mode='auto'"):
        EarlyStopping("loss", mode="auto")


def test_state_goes_on_where_it_was_and_needs_no_pickled_classes(tmp_path: object) -> None:
    first = EarlyStopping("loss", patience=3)
    run(first, [3, 2, 2, 2])
    torch.save(first.state_dict(), f"{tmp_path}/state")
    second = EarlyStopping("loss", patience=3)
    second.load_state_dict(torch.load(f"{tmp_path}/state", weights_only=True))
    assert (second.wait_count, second.best_score.item()) == (2, 2)
    assert run(second, [2, 1]).should_stop
    assert second.stopped_epoch == 0
    assert second.state_key == "EarlyStopping{'monitor': 'loss', 'mode': 'min'}"
