"""The names and defaults of the Trainer's flags, held against Lightning's."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.config.run import RunConfig
from lockstep.ground.errors import MisconfigurationException
from lockstep.trainer import FLAGS
from tests.loop.pieces import QUIET, quiet


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_every_flag_is_documented_in_the_order_of_the_signature() -> None:
    signature = parameters(Trainer.__init__)
    assert signature["others"].kind is inspect.Parameter.VAR_KEYWORD
    assert [*FLAGS] == [name for name in signature if name not in ("self", "others")]
    arguments = inspect.getdoc(Trainer).partition("Args:\n")[2].partition("\nRaises:")[0]
    assert re.findall(r"^    (\w+):", arguments, re.M) == [*FLAGS]
    assert RunConfig.__dataclass_fields__.keys() <= FLAGS.keys()


def test_names_order_and_defaults_are_lightnings(lightning: Any) -> None:
    theirs = parameters(lightning.Trainer)
    own = ("order", "keep_global_batch", "balance", "compile", "non_finite", "record", "hang_timeout", "hang_kill")
    ours = {name: value for name, value in FLAGS.items() if name not in own}
    assert list(ours) == list(theirs)
    assert ours == {name: parameter.default for name, parameter in theirs.items()}
    assert all(
        p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters(Trainer.__init__).values() if p.name in ours
    )


OWN_ARGUMENTS = {"save_checkpoint": {"trainable_only": False}}
"""Arguments of calls that Lightning's do not take, by keyword alone, and their defaults."""


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict", "save_checkpoint", "init_module"])
def test_calls_take_what_lightnings_take(lightning: Any, call: str) -> None:
    ours, theirs = (parameters(getattr(kind, call)) for kind in (Trainer, lightning.Trainer))
    own = {name: ours.pop(name) for name in OWN_ARGUMENTS.get(call, {})}
    assert [(name, p.default) for name, p in ours.items()] == [(name, p.default) for name, p in theirs.items()]
    assert {name: p.default for name, p in own.items()} == OWN_ARGUMENTS.get(call, {})
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own.values())


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_may_be_given_at_its_default(name: str) -> None:
    Trainer(**{**QUIET, name: FLAGS[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit_val_batches", 1.5),
        ("val_check_interval", "soon"),
        ("min_epochs", 9),
        ("check_val_every_n_epoch", None),
    ],
)
def test_a_flag_set_later_is_checked_as_at_construction(name: str, value: Any) -> None:
    trainer = quiet(max_epochs=3, val_check_interval=0.5)
    before = trainer.config
    with pytest.raises(MisconfigurationException, match=name):
        setattr(trainer, name, value)
    assert trainer.config is before


def test_flags_set_later_mean_what_they_mean_at_construction() -> None:
    trainer = quiet(max_epochs=3, max_steps=9)
    trainer.limit_train_batches = 10.0
    trainer.max_time = "00:00:01:00"
    trainer.min_steps = 4
    trainer.val_check_interval = 7
    trainer.check_val_every_n_epoch = None
    assert (trainer.limit_train_batches, trainer.max_time, trainer.min_steps) == (10, 60.0, 4)
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (7, None)
    assert (trainer.max_epochs, trainer.max_steps) == (3, 9)
    trainer.overfit_batches = 2
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.limit_test_batches) == (2, 2, 1.0)
    trainer.fit_loop.max_epochs = 5
    trainer.fit_loop.max_steps = 20
    assert (trainer.max_epochs, trainer.fit_loop.max_epochs, trainer.max_steps) == (5, 5, 20)
    with pytest.raises(MisconfigurationException, match="max_epochs='x'"):
        trainer.fit_loop.max_epochs = "x"
