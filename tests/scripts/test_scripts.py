"""Scripts in the style of Lightning's documents give the same numbers and the same sequence of hooks here as there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.play import GOLDEN, SCRIPTS, play


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Puts back what Lightning and scikit-learn set in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def assert_alike(found: Any, expected: Any, where: str) -> None:
    """The same to five digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(found[name], value, f"{where}: {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_alike(found[number], value, f"{where}[{number}]")
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), where


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["hooks"] == expected["hooks"]
    assert_alike(found["metrics"], expected["metrics"], "metrics")
    assert_alike(found["returned"], expected["returned"], "returned")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gives_lightnings_numbers_and_hooks(script: str, tmp_path: Path) -> None:
    compare(play("lockstep", script, tmp_path), json.loads((GOLDEN / f"{script}.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_golden_files_are_those_of_the_installed_lightning(script: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    if lightning.__version__ != "2.6.6":
        pytest.skip("the files are those of 2.6.6")
    compare(play("lightning.pytorch", script, tmp_path), json.loads((GOLDEN / f"{script}.json").read_text()))
