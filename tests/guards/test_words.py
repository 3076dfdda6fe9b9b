"""Words that a reader stumbles over become fewer in each folder, and never more."""

from __future__ import annotations

import json
from pathlib import Path

from tests.guards.source import Source, house
from tests.guards.words import MOST, counted, odd_first_lines, odd_words


def test_odd_words_become_fewer() -> None:
    most = json.loads(MOST.read_text())
    more = {folder: count for folder, count in counted(house()).items() if count > most.get(folder, 0)}
    assert more == {}, "plainer words, or `python -m tests.guards.words --where` to find them"


def test_what_is_counted() -> None:
    function = 'def f():\n    """Return it.\n\n    It is told\n    anew.\n    """\n    say("begin", "it began")\n'
    text = f'"""What a rank has."""\n\n\n{function}'
    source = Source(Path("lockstep/a.py"), text)
    assert sorted(odd_words(source)) == [(1, "What ..."), (7, "told"), (8, "anew"), (10, "began")]
    assert odd_first_lines({"lockstep.a": source}) == (1, 2)
