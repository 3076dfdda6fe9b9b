"""The acceptance tests see lockstep from outside: by names that users have. What is still excepted is in a list."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from tests.documents.names import DOTTED, in_code, kept
from tests.guards.source import PROJECT, house, names_made, parsed
from tests.guards.test_house import is_face
from tests.tools.absent import is_absent

PATHS = PROJECT / "tests" / "acceptance" / "paths.txt"
EXCEPTED: dict[str, list[str]] = json.loads(PATHS.with_name("inner_names.json").read_text())
"""File -> the inner names that it still uses. Entries go and do not come."""
TOOLS = "lockstep.testing"


def listed() -> list[Path]:
    """The folders and files of the acceptance tests."""
    lines = [line.strip() for line in PATHS.read_text().split("\n")]
    return [PROJECT / line for line in lines if line and not line.startswith("#")]


def with_their_tools(paths: Iterable[Path]) -> dict[str, list[ast.AST]]:
    """The nodes of the files, and of those of tests/ that they import, and so on."""
    todo = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    found: dict[str, list[ast.AST]] = {}
    while todo:
        file = todo.pop()
        name = str(file.relative_to(PROJECT))
        if name not in found and file.is_file():
            found[name] = list(ast.walk(parsed(file.read_text(), name)))
            imported = [one.split(".") for one in in_code(found[name]) if one.startswith("tests.")]
            todo += [PROJECT.joinpath(*parts).with_suffix(".py") for one in imported for parts in (one, one[:-1])]
    return dict(sorted(found.items()))


@lru_cache
def private_names() -> frozenset[str]:
    """What the package itself defines or sets, of names that begin with an underscore."""
    made = {name for source in house().values() for name in names_made(source.nodes)}
    return frozenset(name for name in made if name.startswith("_") and not name.startswith("__"))


def is_public(name: str) -> bool:
    """Whether a page or a face of the package gives a name, and not the file alone in which it happens to stand.

    Names of Lightning's that lead to no file of the same name are public, too.
    """
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if any(part.startswith("_") and not part.startswith("__") for part in parts):
        return False
    if TOOLS in prefixes:
        return True
    file = max((prefix for prefix in prefixes if prefix in house()), key=len)
    return any(len(prefix) >= len(file) and (is_face(prefix) or prefix in kept()) for prefix in prefixes)


def inner_names(nodes: Sequence[ast.AST]) -> list[str]:
    """The names of lockstep's that a test uses and no user has: imports, what is patched by a string, private ones."""
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {name for name in in_code(nodes) if name.split(".")[0] == "lockstep"}
    names |= {name for string in strings for name in DOTTED.findall(string)}
    inner = {name for name in names if not is_public(name)}
    inner = {name for name in inner if not any(other.startswith(f"{name}.") for other in inner)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return sorted(inner | (attributes & private_names() - set(names_made(nodes))))


def test_each_path_is_there() -> None:
    assert [path for path in listed() if not (path.exists() or is_absent(path.as_posix()))] == []
    assert len(set(listed())) == len(listed())


def test_acceptance_tests_and_their_tools_use_public_names() -> None:
    found = {file: names for file, nodes in with_their_tools(listed()).items() if (names := inner_names(nodes))}
    pairs = {(file, name) for file, names in found.items() if not is_absent(file) for name in names}
    excepted = {(file, name) for file, names in EXCEPTED.items() if not is_absent(file) for name in names}
    assert pairs - excepted == set(), "inner names: take what users have"
    assert excepted - pairs == set(), "used no more: take it out of inner_names.json"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from lockstep import Trainer\nTrainer.fit", []),
        ("import lockstep as L\nL.callbacks.Timer", []),
        ("from lockstep.strategies import DDPStrategy", []),
        ("from lockstep.engines.ranks import RankedStrategy", []),  # a page gives it
        ("from lockstep.utilities.exceptions import MisconfigurationException", []),
        ("from lockstep.plugins.io import CheckpointIO", []),  # Lightning's
        ("from lockstep.testing.equivalence import check_equivalence", []),
        ("from lockstep.engines.ddp.strategy import DDPStrategy", ["lockstep.engines.ddp.strategy.DDPStrategy"]),
        ("import lockstep.loop.fit", ["lockstep.loop.fit"]),
        ("from lockstep.loop import fit\nfit.FitLoop", ["lockstep.loop.fit.FitLoop"]),
        ("patch('lockstep.loop.fit.FitLoop')", ["lockstep.loop.fit.FitLoop"]),
        ("import lockstep\nlockstep.ground.rank.is_zero()", ["lockstep.ground.rank.is_zero"]),
        ("trainer._session", ["_session"]),
        ("def _session(): ...\nself._session", []),
    ],
)
def test_inner_names_are_found(text: str, found: list[str]) -> None:
    assert inner_names(list(ast.walk(ast.parse(text)))) == found
