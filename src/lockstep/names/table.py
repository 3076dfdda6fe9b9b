"""The table of Lightning's import paths: the place of each name in lockstep, or the reason why it is refused.

This file also reads the table of methods that Lightning has removed.

``table.json`` holds the rows of import paths. It is read when a name is requested that no file of lockstep has, and not
earlier. Its sections are

- ``moved``: modules that an earlier release of lockstep had elsewhere, with their paths today; "" for a folder;
- ``reasons``: sentences, by the names that rows use for them;
- ``today``: modules below ``lightning.pytorch`` 2.6, which are modules below ``lockstep``;
- ``earlier``: the same for 2019 to 2022, as far as Lightning 2.6 does not have them any more;
- ``fabric``: modules below ``lightning.fabric``, and ``test_tube``: modules of that package. Both are available only
  if a script for Lightning runs unchanged (`lockstep.lightning`);
- ``third_parties``: names of ``lightning.pytorch`` that are available only there, because other packages read them.

A module's rows are a dict from names (several, with spaces) to a row. A row is

- ``"file"`` or ``"file:name"``: a file of lockstep, or a module of torch or rich, that has the object under the same or
  another name;
- ``"!REASON"`` or ``"! a sentence."``: the name is refused.

A refused module has such a row instead of a dict. The key ``=`` takes over the rows of other modules. A module that is
a file of lockstep needs rows only for names that the file does not have.

``former_methods.json`` holds methods of earlier releases, and of Lightning's own classes, that lockstep never calls: by
the kind of object that had them, one name or several (with spaces) and their replacement today.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any


class Refused(str):
    """Reason why a name or module is refused. Its class distinguishes it from an import path, which is a string."""

    __slots__ = ()


Row = str | Refused
Rows = dict[str, Row]
Modules = dict[str, Rows | Refused]
FOLDER = os.path.dirname(__file__)
FILE = os.path.join(FOLDER, "table.json")


@functools.cache
def _read() -> dict[str, Any]:
    with open(FILE, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def moved() -> dict[str, str]:
    """Return a dict from module paths of earlier releases of lockstep to the current paths."""
    found: dict[str, str] = _read()["moved"]
    return found


@functools.cache
def table() -> dict[str, Modules]:
    """Return each section of the table as a dict of modules. Section ``pytorch`` merges ``today`` and ``earlier``."""
    found = {name: section for name, section in _read().items() if name not in ("reasons", "moved")}
    reasons = _read()["reasons"]
    today = _modules(found["today"], reasons, {})
    sections = {name: _modules(section, reasons, today) for name, section in found.items()}
    pytorch = sections["pytorch"] = dict(today)
    for path, rows in sections["earlier"].items():
        before = pytorch.get(path)
        both = isinstance(before, dict) and isinstance(rows, dict)
        pytorch[path] = {**before, **rows} if both else rows  # type: ignore[dict-item]  # both are dicts
    return sections


def _modules(section: Mapping[str, str | Mapping[str, str]], reasons: Mapping[str, str], others: Modules) -> Modules:
    """Return a section of the table with abbreviations expanded to one row for each name of each module."""
    found: Modules = {}
    for path, given in section.items():
        if isinstance(given, str):
            found[path] = Refused(_row(given, reasons))
            continue
        rows: Rows = {}
        for names, row in given.items():
            if names == "=":
                for same in row.split():
                    rows.update(others.get(same) or found[same])  # type: ignore[arg-type]  # none of these is refused
            else:
                rows.update(dict.fromkeys(names.split(), _row(row, reasons)))
        found[path] = rows
    return found


def _row(text: str, reasons: Mapping[str, str]) -> Row:
    if not text.startswith("!"):
        return text
    return Refused(text[2:] if text.startswith("! ") else reasons[text[1:]])


def refusal(module: str, name: str) -> Refused | None:
    """Return the reason why a name or its whole module is refused. Return None if the name is not refused.

    Args:
        module: path of the module below ``lockstep``.
        name: the name in the module.
    """
    rows = table()["pytorch"].get(module, {})
    row = rows if isinstance(rows, Refused) else rows.get(name)
    return row if isinstance(row, Refused) else None


@functools.cache
def former_methods(kind: str) -> dict[str, str]:
    """Return a dict from the methods that Lightning has removed to their replacements.

    ``kind`` is the kind of object: "module", "callback", "strategy" or "precision".
    """
    with open(os.path.join(FOLDER, "former_methods.json"), encoding="utf-8") as file:
        rows: dict[str, str] = json.load(file)[kind]
    return {name: instead for names, instead in rows.items() for name in names.split()}
