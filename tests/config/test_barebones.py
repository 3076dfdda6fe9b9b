"""`Trainer(barebones=True)` beside Lightning's."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Trainer
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Slope, numbers

BARE: dict[str, Any] = {"barebones": True, "accelerator": "cpu"}
CONTRADICT: list[dict[str, Any]] = [
    {"enable_checkpointing": True},
    {"logger": True},
    {"log_every_n_steps": 1},
    {"num_sanity_val_steps": 1},
    {"detect_anomaly": True},
    {"profiler": "simple"},
]
AGREE: list[dict[str, Any]] = [
    {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    {"log_every_n_steps": 0, "num_sanity_val_steps": 0, "fast_dev_run": False, "detect_anomaly": False},
    {"max_epochs": 3, "limit_train_batches": 2, "gradient_clip_val": 1.0},
]


@pytest.mark.parametrize("flags", CONTRADICT, ids=str)
def test_what_contradicts_the_mode_is_refused_here_and_there(lightning: Any, flags: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=rf"barebones=True, {next(iter(flags))}="):
        Trainer(**BARE, **flags)
    with pytest.raises(ValueError, match="barebones=True"):
        lightning.Trainer(**BARE, **flags)


@pytest.mark.parametrize("flags", AGREE, ids=str)
def test_what_goes_with_the_mode(lightning: Any, flags: dict[str, Any]) -> None:
    for kind in (Trainer, lightning.Trainer):
        trainer = kind(**BARE, **flags)
        assert (trainer.loggers, trainer.log_every_n_steps, trainer.num_sanity_val_steps) == ([], 0, 0)
        assert (trainer.checkpoint_callback, trainer.progress_bar_callback, trainer.barebones) == (None, None, True)
        assert trainer.callbacks == []


def test_nothing_is_logged() -> None:
    class Logs(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            self.log_dict({"a": 1.0})
            return super().training_step(batch, batch_idx)

    trainer, module = Trainer(**BARE, max_epochs=1), Logs()
    with pytest.warns(UserWarning, match=r"self.log\(...\) records nothing under Trainer\(barebones=True\)"):
        result = trainer.fit(module, numbers(3))
    assert (result.metrics, len(module.batches)) == ({}, 3)


def test_a_zero_switches_off_as_false_does() -> None:
    """It was taken, since it equals False, and switched on, since it is not False."""
    zeros: Any = {"enable_progress_bar": 0, "enable_model_summary": 0, "enable_checkpointing": 0}
    assert Trainer(accelerator="cpu", logger=False, **zeros).callbacks == []
