"""Lightning's import paths as data: where lockstep has each public name, or why it does not have it.

``table.json`` holds the rows. It is read when a name is asked for that no file of lockstep has, and not before. Its
sections are

- ``moved``: modules that an earlier release of lockstep had elsewhere, with their paths of today; "" for a folder;
- ``reasons``: sentences, by the names that rows refer to them with;
- ``today``: modules below ``lightning.pytorch`` 2.6, which are modules below ``lockstep``;
- ``earlier``: the same for 2019 to 2022, of what Lightning 2.6 does not have any more;
- ``fabric``: modules below ``lightning.fabric``, and ``test_tube``: modules of that package. Both are answered only
  where a script for Lightning runs unchanged (`lockstep.lightning`);
- ``third_parties``: names of ``lightning.pytorch`` that are answered only there, because other packages read them.

A module's rows are a dict from names (several, with spaces) to a row. A row is

- ``"file"`` or ``"file:name"``: a file of lockstep, or a module of torch or rich, that has the object by the same or by
  another name;
- ``"!REASON"`` or ``"! a sentence."``: the name is refused.

A module that is refused has such a row instead of a dict. The key ``=`` takes over the rows of other modules. A module
that is a file of lockstep needs rows only for what the file does not have.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any


class Refused(str):
    """The reason why a name or a module is refused."""

    __slots__ = ()


Row = str | Refused
Rows = dict[str, Row]
Modules = dict[str, Rows | Refused]
FILE = os.path.join(os.path.dirname(__file__), "table.json")


@functools.cache
def _read() -> dict[str, Any]:
    with open(FILE, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def moved() -> dict[str, str]:
    """Where modules of earlier releases of lockstep are today, by the paths that they had."""
    found: dict[str, str] = _read()["moved"]
    return found


@functools.cache
def table() -> dict[str, Modules]:
    """The sections of rows, read once; ``pytorch`` is those of today and of earlier years together."""
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
    """A section with one row for each name."""
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
    """The reason why a name of a module, or all of the module, is refused; None where it is not.

    Args:
        module: its path below ``lockstep``.
        name: as it would be imported from there.
    """
    rows = table()["pytorch"].get(module, {})
    row = rows if isinstance(rows, Refused) else rows.get(name)
    return row if isinstance(row, Refused) else None
