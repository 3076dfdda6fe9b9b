"""What a rank does that is in a function, in words: marks on functions, for whoever looks at the rank's stack.

The supervisor of a node sees files, lines and names of functions, of code that it has not imported. So the marks are
read from the source.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Doing:
    """A mark on a function."""

    words: str  #: "saving a checkpoint"; "": none
    waits: bool  #: whether the function itself waits for other ranks


def does(words: str) -> Callable[[F], F]:
    """Mark a function: who is in it, or in what it calls, does this."""
    return lambda function: function


def waits(words: str = "") -> Callable[[F], F]:
    """Mark a function that waits for other ranks, and maybe say what for."""
    return lambda function: function


@functools.cache
def marks_in(file: str) -> dict[str, Doing]:
    """The marks in a file of lockstep's, by the names of functions; nothing where there is no source."""
    try:
        with open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id in ("does", "waits"):
                words = ast.literal_eval(mark.args[0]) if mark.args else ""
                found[function.name] = Doing(words, mark.func.id == "waits")
    return found
