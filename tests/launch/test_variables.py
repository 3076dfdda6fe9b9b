"""Flags in the environment."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Trainer
from lockstep.launch.environment import flags_of
from tests.loop.pieces import QUIET


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("True", True), ("[0, 1]", [0, 1]), ("ddp", "ddp")])
def test_values_are_read_as_python_writes_them(text: str, value: Any) -> None:
    assert flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": text}) == {"devices": value}


def test_what_the_script_says_counts_more() -> None:
    assert flags_of({"devices": 1}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": "2"}) == {}
    assert flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": ""}) == {}


def test_a_trainer_takes_its_flags_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_EPOCHS": "7", "LIMIT_VAL_BATCHES": "0.5", "ACCUMULATE_GRAD_BATCHES": "4"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    trainer = Trainer(**QUIET, accumulate_grad_batches=2)
    assert (trainer.max_epochs, trainer.limit_val_batches, trainer.accumulate_grad_batches) == (7, 0.5, 2)
