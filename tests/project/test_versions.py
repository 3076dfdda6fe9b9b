"""`scripts/test --versions oldest|newest`: which versions an environment gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import versions
from tests.project.linked import PROJECT

ROOT = Path(__file__).resolve().parents[2]


def test_the_oldest_are_those_that_pyproject_names() -> None:
    lowest = versions.lowest()
    assert lowest["cloudpickle"] == "3.0"
    assert not lowest.keys() & {"torch", "lightning", "hatchling"}
    extras = [
        lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("test", "bench", "docs")
    ]
    asked = [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]
    bounded = {line.partition(">=")[0].partition("[")[0] for line in asked if ">=" in line} - {*versions.KEPT}
    assert lowest.keys() == bounded


def test_torch_and_lightning_stay_as_they_are() -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    newest, oldest = versions.constraints("newest"), versions.constraints("oldest")
    assert set(newest) <= set(pinned)
    assert {line.partition("==")[0] for line in newest} >= {"torch", "lightning"}
    assert oldest[: len(newest)] == newest


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(SystemExit, match="middle: give oldest, newest or torch-VERSION"):
        versions.constraints("middle")
    command = ["bash", str(ROOT / "scripts" / "test"), "--versions"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "scripts/test --versions (nothing): give oldest or newest\n"


def test_another_torch_is_taken_with_all_else_as_it_is_pinned() -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    found = versions.constraints("torch-2.11.0")
    assert found[0] == "torch==2.11.0"
    left_open = {line.partition("==")[0] for line in pinned} - {line.partition("==")[0] for line in found}
    assert {name for name in left_open if not name.startswith("#") and name} == {"torchvision", "setuptools"}
    assert set(found[1:]) <= set(pinned)
    for given in ([], ["nightly"]):
        command = ["bash", str(ROOT / "scripts" / "test"), "--torch", *given]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "give a version, like 2.14.1" in refused.stderr
