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
    extras = [lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("test", "bench")]
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
    with pytest.raises(SystemExit, match="--versions middle: give oldest or newest"):
        versions.constraints("middle")
    command = ["bash", str(ROOT / "scripts" / "test"), "--versions"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "scripts/test --versions (nothing): give oldest or newest\n"
