"""The dotted names of lockstep that the README, the pages and the examples give to users.

    python -m tests.documents.names

adds to names.json those that are new. What stands there goes on working wherever its file moves, so nothing is taken
out because a page no longer says it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name

PROJECT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("names.json")
PLACES = ("README.md", "docs/*.md", "examples/*.py")
TOOLS = {"lockstep.testing.SharedCard"}
"""Tools of the tests, which a page names to say how something was measured: they may move out of the package."""
GROUPS = {"lockstep.commands"}
"""Groups of entry points that are not modules."""
DOTTED = re.compile(r"(?<![\w./-])lockstep(?:\.[A-Za-z_]\w*)+")
IMPORTED = re.compile(r"from (lockstep[\w.]*) import (\w+(?:, \w+)*)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def in_code(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What Python code imports, and what it reads of that by a dot: ``import lockstep as L; L.Trainer``."""
    stands_for = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0]: alias for alias in node.names}
            stands_for |= {name: one.name if one.asname else name for name, one in names.items()}
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stands_for |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in nodes:
        rest: list[str] = []
        while isinstance(node, ast.Attribute):
            node, rest = node.value, [node.attr, *rest]
        if rest and isinstance(node, ast.Name) and node.id in stands_for:
            yield ".".join([stands_for[node.id], *rest])


def in_text(text: str, python: bool = False) -> set[str]:
    """The names in a page, its blocks of code included, or in a file of Python."""
    found = set(DOTTED.findall(text))
    for module, names in IMPORTED.findall(text):
        found |= {f"{module}.{name}" for name in names.split(", ")}
    for code in [text] if python else PYTHON.findall(text):
        found |= set(in_code(list(ast.walk(ast.parse(code)))))
    return {name for name in found - TOOLS - GROUPS if name.startswith("lockstep.")}


def in_the_project() -> dict[str, list[str]]:
    """All names, each with where it stands."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for place in PLACES for path in PROJECT.glob(place)):
        for name in in_text(path.read_text(), python=path.suffix == ".py"):
            found.setdefault(name, []).append(str(path.relative_to(PROJECT)))
    return dict(sorted(found.items()))


def resolves(name: str) -> bool:
    try:
        resolve_name(name)
    except AttributeError:
        return False
    return True


def kept() -> list[str]:
    names: list[str] = json.loads(FILE.read_text())
    return names


if __name__ == "__main__":
    known = set(kept()) if FILE.exists() else set()
    new = {name for name in in_the_project() if resolves(name)} - known
    FILE.write_text(json.dumps(sorted(known | new), indent=1) + "\n")
    print(f"{len(known | new)} names, {len(new)} of them new: {', '.join(sorted(new))}")
