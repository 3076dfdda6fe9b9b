"""docs/floors.svg is what the imports of today give."""

from __future__ import annotations

from pathlib import Path

from scripts import draw_floors as script
from tests.guards.test_house import APART, FLOORS, PACKAGE, read


def test_the_picture_is_that_of_the_imports() -> None:
    fresh = script.drawn(read(PACKAGE)) == script.PICTURE.read_text()
    assert fresh, "the parts' imports have changed: run `python scripts/draw_floors.py` and commit docs/floors.svg"


def test_every_part_is_in_it_in_words() -> None:
    parts = {source.part for source in read(PACKAGE).values()} - {"", "utilities"}
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
