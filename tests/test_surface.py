"""LightningModule, LightningDataModule and Callback have what Lightning's have, with the same arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lockstep
from tests.aliases.surface import lightning

KINDS = ["LightningModule", "LightningDataModule", "Callback"]
UNLIKE = {
    "forward",  # torch's own
    "to_tensorrt",  # refused, whatever it is given
    "to_torchscript",  # refused, too
}


def public(kind: type) -> list[str]:
    """What a class has by itself or from bases that are Lightning's own."""
    own = [base for base in kind.__mro__ if base.__module__.startswith(("lightning", "lockstep"))]
    return sorted({name for base in own for name in vars(base) if not name.startswith("_")})


def arguments(method: Any) -> list[tuple[str, Any]]:
    """Names and defaults of what a method takes, without ``self``."""
    found = inspect.signature(method).parameters.values()
    kept = [each for each in found if each.name not in ("self", "cls")]
    return [
        (each.name, None if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) else each.default) for each in kept
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_missing(name: str) -> None:
    package = lightning()
    if package is None:
        pytest.skip("lightning is not installed")
    theirs, ours = getattr(package, name), getattr(lockstep, name)
    assert [each for each in public(theirs) if not hasattr(ours, each)] == []


def other_arguments(name: str) -> dict[str, Any]:
    """The methods whose arguments differ: ours, and those of Lightning's."""
    theirs, ours = getattr(lightning(), name), getattr(lockstep, name)
    found = {}
    for method in public(theirs):
        their, our = getattr(theirs, method), getattr(ours, method, None)
        if callable(their) and not isinstance(their, type) and our is not None:
            mine, wanted = arguments(our), arguments(their)
            takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(our).parameters.values())
            if mine != wanted and not (takes_any and [each for each in wanted if each[0] in dict(mine)] == mine[:-1]):
                found[method] = (mine, wanted)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_the_same(name: str) -> None:
    if lightning() is None:
        pytest.skip("lightning is not installed")
    assert {method: pair for method, pair in other_arguments(name).items() if method not in UNLIKE} == {}
