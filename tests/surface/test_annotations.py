"""What reads signatures gets objects: `inspect.signature`, `typing.get_type_hints`, and makers of configurations."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal

import pytest

import lockstep
from lockstep.callbacks import ModelCheckpoint
from lockstep.ground.annotations import evaluate

FACES = ("lockstep", *(f"lockstep.{name}" for name in ("callbacks", "loggers", "profilers", "strategies", "utilities")))


def functions_of(face: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of lockstep's own behind the names of a face, by a name for each."""
    module = import_module(face)
    for name in module.__all__:
        found = getattr(module, name)
        members = inspect.getmembers(found) if isinstance(found, type) else [("", found)]
        for method, function in members:
            ours = inspect.isfunction(function) and function.__module__.startswith("lockstep.")
            if ours and (not method.startswith("_") or method == "__init__"):
                yield f"{name}.{method}".rstrip("."), function


@pytest.mark.parametrize("face", FACES)
def test_annotations_were_text(face: str) -> None:
    """`save_last` of `ModelCheckpoint` had the text "bool | Literal['link'] | None", and hooks named no Trainer."""
    for name, function in functions_of(face):
        texts = {key: text for key, text in function.__annotations__.items() if isinstance(text, str)}
        assert texts == {}, name
        typing.get_type_hints(function)


def test_what_they_are() -> None:
    parameters = inspect.signature(ModelCheckpoint).parameters
    assert parameters["save_last"].annotation == bool | Literal["link"] | None
    hints = typing.get_type_hints(lockstep.Callback.on_fit_start)
    assert hints["trainer"] is lockstep.Trainer
    assert hints["pl_module"] is lockstep.LightningModule
    assert lockstep.Result.__annotations__["metrics"] == dict[str, float]


def test_a_users_own_are_left_alone() -> None:
    class Own(ModelCheckpoint):
        def __init__(self, folder: str) -> None:
            super().__init__(folder)

    evaluate(Own)
    assert Own.__init__.__annotations__["folder"] == "str"
