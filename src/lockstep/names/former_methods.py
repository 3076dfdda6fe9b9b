"""Methods of other times, and of Lightning's own classes, that nobody calls here: what to write instead, as data.

``former_methods.json`` holds the rows, by the kind of object that had the methods: a row is one name or several, with
spaces, and what stands for them today.
"""

from __future__ import annotations

import functools
import json
import os

FILE = os.path.join(os.path.dirname(__file__), "former_methods.json")


@functools.cache
def former_methods(kind: str) -> dict[str, str]:
    """What to write instead of each method that a "module", "callback", "strategy" or "precision" had."""
    with open(FILE, encoding="utf-8") as file:
        rows: dict[str, str] = json.load(file)[kind]
    return {name: instead for names, instead in rows.items() for name in names.split()}
