"""Callback: the hooks of Lightning 2.6 with its arguments, and the key of the state."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

import lockstep.callbacks
from lockstep import Trainer
from lockstep.callbacks.base import Callback
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.models import BoringModel


def test_hooks_and_their_arguments_are_those_of_lightning(lightning: Any) -> None:
    ours, theirs = (
        {
            name: [(each.name, each.default) for each in inspect.signature(function).parameters.values()]
            for name, function in vars(kind).items()
            if name.startswith("on_") or name in ("setup", "teardown")
        }
        for kind in (Callback, lightning.Callback)
    )
    assert ours == theirs


def test_state_key_names_the_class_and_the_arguments_that_tell_instances_apart() -> None:
    class Ours(Callback):
        @property
        def state_key(self) -> str:
            return self._generate_state_key(monitor="loss", k=2)

    assert Callback().state_key == "Callback"
    assert Ours().state_key == f"{Ours.__qualname__}{{'monitor': 'loss', 'k': 2}}"
    assert Callback().state_dict() == {}


def test_face_exports_every_name_that_it_lists() -> None:
    for name in lockstep.callbacks.__all__:
        assert getattr(lockstep.callbacks, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = lockstep.callbacks.Nothing


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.EarlyStopping("loss"),
        lambda c: c.LambdaCallback(),
        pytest.param(lambda c: c.WeightAveraging(), marks=pytest.mark.extension("extras")),
        lambda c: c.RichProgressBar(),
    ],
)
def test_callbacks_travel_to_other_processes(make: object) -> None:
    callback = make(lockstep.callbacks)  # type: ignore[operator]
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)


class OwnStopping(EarlyStopping):
    """A class below the Trainer's."""


class Counted(Callback):
    """Has a state, and the key of its class."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


def configured(given: Any, *callbacks: Callback) -> Trainer:
    """A Trainer of these callbacks that has fitted a module which configures others."""

    class Configured(BoringModel):
        def configure_callbacks(self) -> Any:
            return given

    flags = {"accelerator": "cpu", "logger": False, "fast_dev_run": True, "enable_progress_bar": False}
    trainer = Trainer(callbacks=[*callbacks], **flags)
    trainer.fit(Configured())
    return trainer


def test_a_callback_of_the_module_takes_the_place_of_the_classes_above_its_own() -> None:
    plain, own, other = EarlyStopping("loss", strict=False), OwnStopping("loss", strict=False), Callback()
    trainer = configured([own], plain, other)
    assert own in trainer.callbacks
    assert other in trainer.callbacks
    assert plain not in trainer.callbacks
    trainer = configured([EarlyStopping("loss", strict=False)], own)
    assert own in trainer.callbacks  # not the other way round


def test_callbacks_of_the_module_are_checked_as_the_trainers() -> None:
    with pytest.raises(MisconfigurationException, match=r"configure_callbacks.*2 callbacks have the same state_key"):
        configured([Counted(), Counted()])
    with pytest.raises(TypeError, match=r"configure_callbacks\(\)"):
        configured([3])
