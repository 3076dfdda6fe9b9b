"""The pictures of the pages: well-formed, and that of a run shows what the README's first script prints."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import draw_run

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown(text: str, columns: int = 10) -> list[str]:
    screen = draw_run.Screen(columns)
    screen.feed(text)
    return ["".join(letter for letter, _ in line) for line in screen.lines]


def test_a_screen_shows_what_a_terminal_would() -> None:
    assert shown("one\r\ntwo\rT") == ["one", "Two"]
    assert shown("12345678901") == ["1234567890", "1"]
    assert shown("bar 1\r\nval\r\x1b[2K\x1b[1A\x1b[2Kbar 2\r\n\x1b[3mval") == ["bar 2", "val"]
    assert shown("abc\b\b\x1b[K\x1b[?25h!") == ["a!"]


def test_colours_go_with_their_letters() -> None:
    screen = draw_run.Screen(10)
    screen.feed("\x1b[1;35ma\x1b[0mb\x1b[38;5;237mc")
    assert screen.lines == [[("a", ("1", "35")), ("b", ()), ("c", ("38;5;237",))]]
    assert draw_run.look(("1", "35")) == 'fill="#d2a8ff" font-weight="700"'


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_is_well_formed(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_the_picture_is_of_the_first_script() -> None:
    texts = [element.text or "" for element in ElementTree.parse(draw_run.PICTURE).iter() if element.text]
    readme = (DOCS.parent / "README.md").read_text()
    assert "python first.py" in texts
    assert any("validation loss" in text for text in texts)
    assert any(re.match(r"lockstep: rank 1 failed first, at \./fails\.py:\d+: KeyError", text) for text in texts)
    assert draw_run.STEP in readme
    assert "max_epochs=20" in readme
