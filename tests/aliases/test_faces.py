"""The names of a face that are imported when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.names.finder import late


@pytest.fixture
def face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a name of its own, and one from beside it."""
    for name, text in (
        ("house/__init__.py", ""),
        ("house/face/__init__.py", ""),
        ("house/face/own.py", "Own = 3"),
        ("house/beside.py", "Other = 4"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("house.face")
    yield "house.face"
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def test_what_is_no_name_of_it_is_refused_as_by_any_module(face: str) -> None:
    with pytest.raises(AttributeError, match=r"module 'house\.face' has no attribute 'nope'"):
        late(face, {"Own": "own"}, "nope")
