"""Python files as trees and as numbers: what the guards and scripts/measure read. The standard library alone."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "lockstep"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    path: Path
    """Relative to the folder that holds the package."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree. Many guards look at them, and a walk takes longer than a look."""
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def part(self) -> str:
        """The folder or file directly under lockstep/ that this belongs to; empty for the face itself."""
        return ".".join(self.module.split(".")[1:2])


def parsed(text: str, name: str) -> ast.Module:
    """The tree of a file. Nothing of it is garbage: to look for some meanwhile takes three times as long as it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text, name)
    finally:
        if collects:
            gc.enable()


Sources = dict[str, Source]


def read(package: Path) -> Sources:
    """All files of a package, by module name."""
    files = [Source(path.relative_to(package.parent), path.read_text()) for path in package.rglob("*.py")]
    return {source.module: source for source in sorted(files, key=lambda one: one.path)}


@lru_cache
def house() -> Sources:
    """The package, read and parsed once in a process."""
    return read(PACKAGE)


def names_made(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What code defines or sets."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def imports(source: Source, sources: Sources) -> Iterator[tuple[int, str]]:
    """Line and module of everything that a file imports, late and type-only imports too.

    ``from lockstep.ground import tree`` is an import of the file ``lockstep.ground.tree``; a relative import
    gives the module that it stands for.
    """
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = source.module.split(".")
                here = here[: len(here) - node.level + source.is_init]
                base = ".".join([*here, *base.split(".")]).strip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node.lineno, name if name in sources else base


@dataclass(frozen=True)
class Function:
    """One function or method, functions within it included."""

    path: str
    line: int
    name: str
    """With the classes and functions around it."""
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Numbers:
    """What one file counts."""

    lines: int = 0
    """That hold code: docstrings, comments and blank lines are left out."""
    tokens: int = 0
    """Names, numbers, strings and operators, without docstrings."""
    comments: int = 0
    """Lines that hold a comment alone."""
    functions: list[Function] = field(default_factory=list)
    """Methods, and functions within functions, too."""
    classes: list[ast.ClassDef] = field(default_factory=list)


TOKEN = re.compile(
    r"""
    (?P<passed> \#[^\n]* | \s+ | \\\n )
    | (?i:[rbfu]{,2}) (?: \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | "(?:\\.|[^\\"])*" | '(?:\\.|[^\\'])*' )
    | (?:\d|\.\d)(?:[eE][+-]|[\w.])*
    | \w+
    | \*\*= | //= | >>= | <<= | \.\.\.
    | -> | := | \*\* | // | << | >> | [-+*/%&|^@=!<>]=
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
"""A token, alike in all versions of Python: since 3.12 the tokenize module cuts f-strings into parts."""


def numbers(source: Source) -> Numbers:
    """Counts a file, by one walk through its tree and one through its text."""
    found = Numbers()
    documented: set[int] = set()
    within_strings: set[int] = set()

    def visit(node: ast.AST, around: str) -> None:
        """Notes a node and what is below it."""
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            within_strings.update(lines_of(node))
        if isinstance(node, Definition):
            around = f"{around}.{node.name}".strip(".")
        if isinstance(node, ast.Module | Definition):
            documented.update(line for one in node.body if is_docstring(one) for line in lines_of(one))
        for child in ast.iter_child_nodes(node):
            visit(child, around)
        if isinstance(node, ast.ClassDef):
            found.classes.append(node)
        elif isinstance(node, Definition):
            found.functions.append(Function(str(source.path), node.lineno, around, node))

    visit(source.tree, "")
    lines = ["" if number in documented else line for number, line in enumerate(source.text.split("\n"), start=1)]
    code = {number for number, line in enumerate(lines, start=1) if line.strip() and not line.lstrip().startswith("#")}
    found.lines = len(code | (within_strings - documented))  # a blank line or a # may be part of a string
    found.tokens = tokens("\n".join(lines))
    own = {number for number, line in enumerate(lines, start=1) if line.lstrip().startswith("#")}
    found.comments = len(own - within_strings)
    return found


def tokens(text: str) -> int:
    """How many tokens a text has, without comments."""
    return sum(match.lastgroup != "passed" for match in TOKEN.finditer(text))


def lines_of(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_docstring(node: ast.stmt) -> bool:
    """Of a module, class or function, or of the attribute above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_lines(node: ast.stmt, text: str) -> int:
    """The lines of a function or class that hold code."""
    documented = {line for one in ast.walk(node) for line in _docstring_lines(one)}
    lines = text.split("\n")
    shown = (lines[line - 1].strip() for line in lines_of(node) if line not in documented)
    return sum(bool(line) and not line.startswith("#") for line in shown)


def _docstring_lines(node: ast.AST) -> Iterable[int]:
    body = node.body if isinstance(node, ast.Module | Definition) else []
    return (line for one in body if is_docstring(one) for line in lines_of(one))
