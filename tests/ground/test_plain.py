"""Plain forms: equal where there is an equal, named by the way to it where there is none."""

from __future__ import annotations

import collections
import enum
import functools
import io
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.tree import NotPlain, plain


class Colour(enum.Enum):
    RED = "red"


class Mode(str, enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Layer:
    size: int = 2
    where: Path = Path("a")


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "form"),
    [
        *[(each, each) for each in (None, True, 3, 1 << 70, 0.5, 1j, "x", torch.float16, torch.device("cpu"))],
        *[(Path("a/b"), "a/b"), (Colour.RED, "red"), (Mode.FAST, "fast"), (Level.HIGH, 3)],
        *[(np.float64(0.5), 0.5), (np.int64(2), 2), (np.bool_(True), True), (np.str_("s"), "s")],
        (Namespace(a=Namespace(b=Path("c"))), {"a": {"b": "c"}}),
        (Layer(), {"size": 2, "where": "a"}),
        (AttributeDict(a=AttributeDict(b=1)), {"a": {"b": 1}}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (Pair(1, Path("b")), (1, "b")),
        ([{"a": (Colour.RED,)}], [{"a": ("red",)}]),
        (frozenset({1}), {1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_forms_that_a_checkpoint_can_hold(value: Any, form: Any) -> None:
    found = plain(value)
    assert found == form
    assert type(found) is type(form)
    buffer = io.BytesIO()
    torch.save(found, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == form


def function() -> None: ...


@pytest.mark.parametrize(
    "value",
    [function, nn.ReLU, functools.partial(function), nn.Linear(1, 1), object(), np.array([object()]), lambda: 0],
    ids=lambda value: type(value).__name__,
)
def test_code_and_objects_have_none(value: Any) -> None:
    with pytest.raises(NotPlain) as caught:
        plain({"a": [1, (value,)]})
    assert caught.value.keys == ("a", 1, 0)
    assert caught.value.value is value
