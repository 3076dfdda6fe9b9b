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

PLAIN = """
    on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end on_train_start on_train_end
    on_train_epoch_start on_train_epoch_end on_validation_start on_validation_end on_validation_epoch_start
    on_validation_epoch_end on_test_start on_test_end on_test_epoch_start on_test_epoch_end on_predict_start
    on_predict_end on_predict_epoch_start on_predict_epoch_end on_after_backward
"""
EVALUATION = ("validation", "test", "predict")
LIGHTNING_2_6 = {
    **{name: [] for name in PLAIN.split()},
    **{f"on_{what}_batch_start": ["batch", "batch_idx", "dataloader_idx=0"] for what in EVALUATION},
    **{f"on_{what}_batch_end": ["outputs", "batch", "batch_idx", "dataloader_idx=0"] for what in EVALUATION},
    "setup": ["stage"],
    "teardown": ["stage"],
    "on_train_batch_start": ["batch", "batch_idx"],
    "on_train_batch_end": ["outputs", "batch", "batch_idx"],
    "on_exception": ["exception"],
    "on_save_checkpoint": ["checkpoint"],
    "on_load_checkpoint": ["checkpoint"],
    "on_before_backward": ["loss"],
    "on_before_optimizer_step": ["optimizer"],
    "on_before_zero_grad": ["optimizer"],
}


def test_hooks_and_their_arguments_are_those_of_lightning() -> None:
    hooks = {
        name: [
            p.name if p.default is p.empty else f"{p.name}={p.default}"
            for p in inspect.signature(function).parameters.values()
        ]
        for name, function in vars(Callback).items()
        if name.startswith("on_") or name in ("setup", "teardown")
    }
    assert hooks == {name: ["self", "trainer", "pl_module", *more] for name, more in LIGHTNING_2_6.items()}


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
    with pytest.raises(MisconfigurationException, match=r"configure_callbacks\(\): 2 callbacks share the state_key"):
        configured([Counted(), Counted()])
    with pytest.raises(TypeError, match=r"configure_callbacks\(\)"):
        configured([3])
