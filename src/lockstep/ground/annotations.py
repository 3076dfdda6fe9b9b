"""Evaluation of string annotations, for code that inspects signatures at run time.

The public modules evaluate them for the classes and functions that users import, at the first use.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

OURS = "lockstep"


def evaluate(found: object) -> None:
    """Replace annotations that are strings by the objects that they name.

    The argument is a function or a class. For a class, its methods and its bases in lockstep are included.

    Names from packages that are not imported become `typing.Any`. Annotations of other packages are left alone.
    """
    if isinstance(found, type):
        for kind in found.__mro__:
            if _is_ours(kind):
                _evaluate_class(kind)
    elif isinstance(found, FunctionType) and _is_ours(found):
        _evaluate_in(found.__annotations__, found.__module__)


@functools.cache
def _evaluate_class(kind: type) -> None:
    for function in _functions(kind):
        if _is_ours(function):
            _evaluate_in(function.__annotations__, function.__module__)
    _evaluate_in(vars(kind).get("__annotations__", {}), kind.__module__)


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a class whose annotations are evaluated: constructor, public methods and properties.

    The annotations of other methods might require imports.
    """
    for name, value in [*vars(kind).items()]:
        if name.startswith("_") and name != "__init__":
            continue
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        for each in (inner.fget, inner.fset) if isinstance(inner, property) else (inner,):
            if isinstance(each, FunctionType):
                yield each


def _is_ours(found: type | FunctionType) -> bool:
    return found.__module__.partition(".")[0] == OURS


def _evaluate_in(annotations: dict[str, Any], module: str) -> None:
    """Replace the strings in ``annotations`` by the objects that they name, as far as they can be evaluated."""
    for name, text in annotations.items():
        if isinstance(text, str):
            annotations[name] = _value(text, module)


@functools.cache
def _value(text: str, module: str) -> Any:
    """Evaluate the string of an annotation in the namespace of a module. The result is cached."""
    try:
        # Only strings of lockstep's own source are evaluated.
        return eval(text, vars(sys.modules[module]), _ForTypeCheckers(module))
    except (NameError, TypeError, AttributeError, ImportError):
        return text


class _ForTypeCheckers(dict[str, Any]):
    """Dict of names that a module imports for type checkers only. Each name is imported when it is first looked up."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __missing__(self, name: str) -> Any:
        home = _imports(self._module).get(name)
        if home is None:
            raise KeyError(name)  # the module's own
        path, attribute = home
        package = path.partition(".")[0]
        if package not in (OURS, "torch", "typing", "collections") and package not in sys.modules:
            return Any if attribute else _Anything()
        module = import_module(path)
        return module if not attribute else getattr(module, attribute)


class _Anything:
    """A stand-in for a package that has not been imported. Each attribute is `typing.Any`."""

    def __getattr__(self, name: str) -> Any:
        return Any


@functools.cache
def _block(file: str) -> ast.Module:
    """Return the block ``if TYPE_CHECKING:`` of a file. The result is empty without such a block, or without source."""
    try:
        with open(file) as source:
            # Only the block is parsed; a whole file takes many times longer.
            rest = source.read().partition("\nif TYPE_CHECKING:\n")[2]
    except OSError:  # installed without sources
        rest = ""
    lines = []
    for line in rest.splitlines():
        if line and not line.startswith((" ", ")")):
            break
        lines.append(line)
    return ast.parse("if True:\n" + "\n".join(lines)) if lines else ast.Module([], [])


def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Return the imports in a module's block ``if TYPE_CHECKING:``, as a dict: local name to module and attribute."""
    found = {}
    for node in ast.walk(_block(sys.modules[module].__file__ or "")):
        if isinstance(node, ast.ImportFrom):
            found.update({each.asname or each.name: (node.module or "", each.name) for each in node.names})
        elif isinstance(node, ast.Import):
            found.update({each.asname or each.name: (each.name, "") for each in node.names})
    return found
