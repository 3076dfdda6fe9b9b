"""The names that users import from `lockstep.utilities`."""

from __future__ import annotations

from importlib import import_module

import pytest

import lockstep.utilities
from tests.tools.extensions import needs

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
    pytest.param("throughput", marks=needs("ground.throughput")),
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
