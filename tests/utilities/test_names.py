"""The names that users import from `lockstep.utilities`, and where else they are."""

from __future__ import annotations

from importlib import import_module

import pytest

import lockstep.utilities

SUBMODULES = [
    "apply_func",
    "combined_loader",
    "exceptions",
    "grads",
    "memory",
    "model_summary",
    "parsing",
    "rank_zero",
    "seed",
    "throughput",
    "types",
]


@pytest.mark.parametrize("name", lockstep.utilities.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(lockstep.utilities, name) is not None
    assert name in dir(lockstep.utilities)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_every_submodule_only_hands_on(submodule: str) -> None:
    module = import_module(f"lockstep.utilities.{submodule}")
    for name in module.__all__:
        assert getattr(getattr(module, name), "__module__", "") != module.__name__, name


def test_the_same_object_by_every_name() -> None:
    from lockstep.ground.rank import rank_zero_only
    from lockstep.utilities.rank_zero import rank_zero_only as by_submodule

    assert lockstep.utilities.rank_zero_only is rank_zero_only is by_submodule


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lockstep.utilities.nothing
