"""YAML files of the user's, read as plain values; one whose aliases would grow without bound is refused."""

from __future__ import annotations

import os
from typing import Any

LARGEST = 2 * 2**20
"""Bytes of a file of settings."""

MOST = 1_000_000
"""Values that such a file may stand for, aliases counted each time."""


def read(path: str | os.PathLike[str]) -> Any:
    """The values of a YAML file.

    Raises:
        ModuleNotFoundError: there is no package `yaml`.
        OSError: the file cannot be read.
        ValueError: it is no YAML, or stands for too much.
    """
    with open(path, "rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    return parse(text)


def parse(text: str | bytes) -> Any:
    """The values of a text in YAML; errors as of `read`."""
    import yaml  # type: ignore[import-untyped]

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"it is no YAML ({said[:300]})" if said else "it is nested too deeply") from error


def _check(root: Any) -> None:
    """Refuse a document that holds itself, or stands for more than `MOST` values."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        inner = _inner(node)
        if done:
            under_way.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(each)] for each in inner)
            if sizes[id(node)] > MOST:
                raise ValueError(f"its aliases stand for more than {MOST} values")
        elif id(node) in under_way:
            raise ValueError("an alias in it stands for what it is a part of")
        elif id(node) not in sizes:
            under_way.add(id(node))
            stack.append((node, True))
            stack += [(each, False) for each in inner]


def _inner(node: Any) -> list[Any]:
    value = node.value
    if not isinstance(value, list):
        return []
    return [each for item in value for each in (item if isinstance(item, tuple) else (item,))]
