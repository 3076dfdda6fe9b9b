"""The border between the core and the extensions, as it is in the source: who imports and uses what."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from tests.guards.source import Source, Sources, code_lines, imports

ROOT = "lockstep.extensions"
TABLE = "lockstep.ground.extensions"
PATH = re.compile(r"(lockstep\.)?extensions[./]\w")


def extension_of(module: str) -> str:
    """The extension that a module belongs to; "" for the core."""
    return module.split(".")[2] if module.startswith(f"{ROOT}.") else ""


def is_core(source: Source) -> bool:
    return not source.module.startswith(ROOT) and source.part != "testing"


def crossings(sources: Sources, editors_lines: dict[str, set[int]]) -> Iterator[str]:
    """Imports of an extension in the core, late and type-only ones too, and strings with the path of one.

    Args:
        sources: the package.
        editors_lines: by the module of a face, the lines that repeat the table for type checkers.
    """
    for source in sources.values():
        if not is_core(source) or source.module == TABLE:
            continue
        excepted = editors_lines.get(source.module, set())
        for line, name in imports(source, sources):
            if extension_of(name) and line not in excepted:
                yield f"{source.path}:{line} imports {name}: ask {TABLE} for it by name"
        for node in source.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.match(node.value):
                yield f"{source.path}:{node.lineno} has the path {node.value!r}: ask {TABLE} for it by name"


def between(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """The extension, its file and the other extension's module of each import of an extension in another one."""
    for source in sources.values():
        mine = extension_of(source.module)
        for _, name in imports(source, sources) if mine else ():
            if extension_of(name) not in ("", mine):
                yield mine, source.path.as_posix(), name


@lru_cache(maxsize=2)
def _uses(package: int, sources: tuple[Source, ...]) -> dict[str, dict[str, int]]:
    """How often each name is read in each module."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.alias):
                names = [node.name.split(".")[-1]]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names = [node.value]
            else:
                continue
            for name in names:
                found[name][source.module] += 1
    return found


def uses(sources: Sources) -> dict[str, dict[str, int]]:
    return _uses(id(sources), tuple(sources.values()))


def only_for_extensions(sources: Sources) -> list[tuple[int, str, str]]:
    """Lines, file and name of each function or class of the core that only extensions use."""
    used = uses(sources)
    found: list[tuple[int, str, str]] = []

    def look(source: Source, body: list[ast.stmt], around: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            users = {name for name in used[node.name] if name != source.module and not sources[name].is_init}
            alone = used[node.name].get(source.module, 0) == 0 and not node.name.startswith("__")
            if users and alone and all(map(extension_of, users)):
                found.append((code_lines(node, source.text), source.path.as_posix(), f"{around}{node.name}"))
            elif isinstance(node, ast.ClassDef):
                look(source, node.body, f"{around}{node.name}.")

    for source in sources.values():
        if is_core(source) and not source.module.startswith("lockstep.utilities"):
            look(source, source.tree.body, "")
    return sorted(found, reverse=True)


def private_names(sources: Sources) -> list[tuple[str, str]]:
    """File of an extension and private name of the core that it uses: each pair once."""
    made: dict[str, set[str]] = defaultdict(set)
    for source in sources.values():
        for node in source.nodes:
            name = None
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name is not None and name.startswith("_") and not name.startswith("__"):
                made[name].add(extension_of(source.module))
    found = set()
    for source in sources.values():
        mine = extension_of(source.module)
        for node in source.nodes if mine else ():
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if "" in made.get(name, ()) and mine not in made[name]:
                found.add((source.path.as_posix(), name))
        # what a class of an extension overrides of the core's
        for node in source.nodes if mine else ():
            if isinstance(node, ast.ClassDef) and node.bases:
                for inner in node.body:
                    target = inner.targets[0] if isinstance(inner, ast.Assign) else inner
                    name = getattr(target, "name", getattr(target, "id", ""))
                    if name.startswith("_") and not name.startswith("__") and "" in made.get(name, ()):
                        found.add((source.path.as_posix(), name))
    return sorted(found)
