"""A small part of the suite, on the made-up device each day; `scripts/test --device made-up` runs all that can."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.testing import devices
from tests.accelerator.left_out import LEFT_OUT, ON_CARD, why_not
from tests.accelerator.madeup import NAME, missing
from tests.tools.fresh import python

ROOT = Path(__file__).parents[2]
FILES = ("tests/loop/test_overfit.py", "tests/precision/test_scaler.py")  # of ranks: test_lockstep.py


def test_a_part_of_the_suite_passes_on_the_device() -> None:
    if missing():
        pytest.skip(missing())
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", "not on_two_ranks", *FILES]
    ended = python(*words, folder=ROOT, **{devices.VARIABLE: NAME})
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    assert " passed" in ended.stdout


def test_what_is_left_out_has_a_reason_and_is_there() -> None:
    for pattern, reason in [*LEFT_OUT.items(), *ON_CARD.items()]:
        file, _, name = pattern.partition("::")
        assert len(reason) > 20, pattern
        if not file.startswith("*"):
            found = list(ROOT.glob(file))
            assert found, pattern
            plain = name.split("[")[0].rstrip("*").lstrip("*")
            assert "*" in plain or any(plain in each.read_text() for each in found), pattern
    assert why_not("tests/loop/test_memory.py::test_x[1-2]", [], "madeup") == LEFT_OUT["tests/loop/test_memory.py::*"]
    assert why_not("tests/loop/test_fit.py::test_x", ["lightning"], "cuda")
    assert why_not("tests/launch/test_fork.py::test_x", [], "cuda")
    assert not why_not("tests/loop/test_memory.py::test_x[1-2]", ["lightning"], "cpu")
    assert not why_not("tests/loop/test_fit.py::test_x", [], "madeup")
