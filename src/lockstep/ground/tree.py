"""Map over and list the leaves of a nested batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any

Types = type | tuple[type, ...]


def tree_map(fn: Callable[[Any], Any], batch: Any, leaf_types: Types) -> Any:
    """A copy of ``batch`` with ``fn`` applied to every object of ``leaf_types``.

    Goes through dicts and other mappings, lists, tuples, namedtuples and dataclasses (frozen ones too), each
    of which comes back as its own type. Whatever else there is stays the same object. A container that is
    itself of ``leaf_types`` is a leaf.

    Args:
        fn: takes a leaf, returns what stands in its place.
        batch: any object.
        leaf_types: a class or several, as of `isinstance`.

    Example:
        >>> tree_map(lambda n: n + 1, {"a": [1, 2], "b": "text"}, int)
        {'a': [2, 3], 'b': 'text'}
    """
    if isinstance(batch, leaf_types):
        return fn(batch)
    kind = batch.__class__
    if kind is list or kind is tuple:
        return kind([tree_map(fn, item, leaf_types) for item in batch])
    if kind is dict:
        return {key: tree_map(fn, value, leaf_types) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(tree_map(fn, item, leaf_types) for item in batch))
    if isinstance(batch, list | tuple):
        return kind(tree_map(fn, item, leaf_types) for item in batch)
    if isinstance(batch, Mapping):
        return _map_mapping(fn, batch, leaf_types)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _map_dataclass(fn, batch, leaf_types)
    return batch


def tree_leaves(batch: object, leaf_types: Types) -> Iterator[Any]:
    """The objects of ``leaf_types`` in ``batch``, in the order in which `tree_map` meets them."""
    if isinstance(batch, leaf_types):
        yield batch
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tree_leaves(item, leaf_types)
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tree_leaves(item, leaf_types)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            # a field without a default may be missing until somebody sets it
            if hasattr(batch, field.name):
                yield from tree_leaves(getattr(batch, field.name), leaf_types)


def _map_mapping(fn: Callable[[Any], Any], batch: Mapping[Any, Any], leaf_types: Types) -> Any:
    mapped = {key: tree_map(fn, value, leaf_types) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        # a copy keeps what the type has beside its items: a default factory, attributes
        result = copy.copy(batch)
        result.update(mapped)
        return result
    return type(batch)(mapped)  # type: ignore[call-arg]


def _map_dataclass(fn: Callable[[Any], Any], batch: Any, leaf_types: Types) -> Any:
    result = copy.copy(batch)
    for field in dataclasses.fields(batch):
        if hasattr(batch, field.name):
            # object's own setattr, since a frozen dataclass refuses the usual one
            object.__setattr__(result, field.name, tree_map(fn, getattr(batch, field.name), leaf_types))
    for name in [n for n in getattr(result, "__dict__", ()) if _is_cached(type(batch), n)]:
        # a cached property was computed from the leaves before the map
        del result.__dict__[name]
    return result


def _is_cached(kind: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), cached_property) for base in kind.__mro__)
