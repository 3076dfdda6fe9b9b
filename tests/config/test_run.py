"""Flags: what they mean, and what is said of those that cannot work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep import Trainer
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import QUIET, quiet


@pytest.mark.parametrize(
    ("flags", "meaning"),
    [
        ({}, {"max_epochs": 1000, "max_steps": -1, "max_time": None, "min_epochs": 0, "min_steps": 0}),
        ({"max_steps": 5}, {"max_epochs": -1, "max_steps": 5}),
        ({"max_time": "01:02:03:04"}, {"max_epochs": -1, "max_time": 93784.0}),
        ({"max_time": {"hours": 1, "minutes": 30}}, {"max_time": 5400.0}),
        ({"gradient_clip_val": 0}, {"gradient_clip_val": None}),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "VALUE"}, {"gradient_clip_algorithm": "value"}),
        ({"fast_dev_run": 4}, {"fast_dev_run": 4, "limit_train_batches": 4, "limit_test_batches": 4, "max_epochs": 1}),
    ],
)
def test_what_flags_mean(flags: dict[str, Any], meaning: dict[str, Any]) -> None:
    trainer = quiet(**flags)
    assert {name: getattr(trainer, name) for name in meaning} == meaning
    assert {name: getattr(trainer.config, name) for name in meaning} == meaning


REFUSED: list[dict[str, Any]] = [
    {"max_epochs": -2},
    {"min_steps": "three"},
    {"max_time": "12:30"},
    {"limit_val_batches": "all"},
    {"val_check_interval": 0},
    {"accumulate_grad_batches": 0},
    {"max_steps": 2.5},
    {"accumulate_grad_batches": {0: 0}},
    {"gradient_clip_val": -1.0},
    {"gradient_clip_algorithm": "l1"},
    {"fast_dev_run": -1},
    {"deterministic": "maybe"},
    {"order": "random"},
    {"hang_timeout": 0},
    {"precision": "8-true"},
    {"strategy": "dpp"},
    {"accelerator": "abacus"},
    {"devices": "many"},
    {"logger": "tensorboard"},
    {"sync_batchnorm": "yes"},
    {"model_registry": "me/model"},
]


@pytest.mark.parametrize("flags", REFUSED, ids=str)
def test_a_value_that_cannot_work_is_named_with_its_flag(flags: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        Trainer(**{**QUIET, **flags})
    ((name, value),) = flags.items()
    message = str(raised.value)
    assert name in message
    assert repr(value) in message or str(value) in message
    assert "\n" not in message
    assert len(message) < 420


def test_whole_numbers_may_be_written_as_floats_or_by_numpy() -> None:
    """As configs write them: ``max_steps: 1e3``."""
    counts = {"max_epochs": 3, "max_steps": 1000, "min_epochs": 1, "min_steps": 2, "log_every_n_steps": 5}
    counts |= {"num_sanity_val_steps": 1, "check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1}
    for kind in (float, np.int64, np.float64):
        config = quiet(**{name: kind(count) for name, count in counts.items()}).config
        for name, count in counts.items():
            assert (getattr(config, name), type(getattr(config, name))) == (count, int)
        assert repr(quiet(accumulate_grad_batches=kind(2)).config.accumulate_grad_batches) == "2"
        assert repr(quiet(fast_dev_run=kind(7)).config.fast_dev_run) == "7"
        assert quiet(num_nodes=kind(1), devices=kind(1)).world_size == 1
    assert repr(quiet(accumulate_grad_batches={0.0: 8.0, 5.0: 4}).config.accumulate_grad_batches) == "{0: 8, 5: 4}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3, max_epochs=2"),
        ({"min_steps": 3, "max_steps": 2}, "min_steps=3, max_steps=2"),
        ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch=None.*int"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, "val_check_interval=0.5.*int"),
        ({"max_epoch": 3}, "no flag `max_epoch`.*`max_epochs`"),
        ({"zzz": 1}, "no flag `zzz`.*The flags are: .*max_epochs"),
    ],
)
def test_combinations_and_names_that_cannot_work(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        quiet(**flags)


@pytest.mark.parametrize("flags", [{"zzz": 1}, {"stochastic_weight_avg": True}])
def test_a_flag_that_is_not_there_is_a_type_error(flags: dict[str, Any]) -> None:
    """Programs for several versions of Lightning catch that, as Python raises it for a name that is no argument."""
    with pytest.raises(TypeError):
        quiet(**flags)


def test_flags_and_their_callbacks_must_not_contradict() -> None:
    from lockstep.callbacks import ModelCheckpoint, ModelSummary

    with pytest.raises(MisconfigurationException, match=r"enable_checkpointing=False, callbacks=\[ModelCheckpoint"):
        Trainer(enable_checkpointing=False, callbacks=ModelCheckpoint(), accelerator="cpu")
    with pytest.raises(MisconfigurationException, match="have the same state_key"):
        Trainer(callbacks=[ModelCheckpoint(), ModelCheckpoint()], accelerator="cpu")
    trainer = Trainer(callbacks=ModelSummary(), accelerator="cpu", logger=False)
    assert sum(isinstance(callback, ModelSummary) for callback in trainer.callbacks) == 1
    assert trainer.checkpoint_callback is trainer.callbacks[-1]
