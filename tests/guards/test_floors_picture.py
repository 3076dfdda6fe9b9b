"""docs/floors.svg is what the imports of today give."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from scripts import draw_floors as script
from tests.guards.source import house, read
from tests.guards.test_house import APART, FLOORS


def test_the_picture_is_that_of_the_imports() -> None:
    fresh = script.drawn(house()) == script.PICTURE.read_text()
    assert fresh, "the parts' imports have changed: run `python scripts/draw_floors.py` and commit docs/floors.svg"


def test_every_part_is_in_it_in_words() -> None:
    parts = {source.part for source in house().values()} - {"", "utilities"}
    assert parts <= (FLOORS.keys() | APART) & script.WORDS.keys()
    assert all(f">{part}" in script.PICTURE.read_text() for part in parts)


def test_arrows_are_the_imports_that_do_not_follow_from_others(tmp_path: Path) -> None:
    files = {
        "trainer.py": "from lockstep.loop import fit\nfrom lockstep.data import order\nimport lockstep.ground.tree",
        "loop/fit.py": "def late():\n    from lockstep.data.order import Order",
        "launch/script.py": "from lockstep.supervise import status",
        "supervise/status.py": "from lockstep.launch import script\nfrom lockstep.data import order",
        "data/order.py": "",
        "ground/tree.py": "",
    }
    for name, text in files.items():
        (tmp_path / "lockstep" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lockstep" / name).write_text(text)
    sources = read(tmp_path / "lockstep")
    assert script.arrows_of(script.edges_of(sources)) == [
        ("launch", "supervise"),
        ("loop", "data"),
        ("supervise", "data"),
        ("supervise", "launch"),
        ("trainer", "loop"),
    ]
    assert script.drawn(sources).count("marker-end") == 4  # launch and supervise import each other


def test_nothing_is_drawn_outside_of_the_canvas() -> None:
    """Eight boxes stood in a row that has room for six: two were cut, and arrows left the picture."""
    picture = ElementTree.parse(script.PICTURE).getroot()
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    boxes = []
    for element in picture:
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            x, y, wide, high = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width
            assert 0 <= y <= y + high <= height
            if high == script.BOX[1]:
                boxes.append((x, y, wide))
        elif kind == "path":
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", element.attrib["d"])]
            assert all(0 <= x <= width for x in numbers[::2])
            assert all(0 <= y <= height for y in numbers[1::2])
    for (x, y, wide), (other, beside, _) in pairwise(sorted(boxes, key=lambda box: (box[1], box[0]))):
        assert y != beside or x + wide < other, "two boxes overlap"
