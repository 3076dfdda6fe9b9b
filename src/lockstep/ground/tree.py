"""Functions that apply a function to the leaves of nested values, and that convert values for checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Types = type | tuple[type, ...]


def tree_map(fn: Callable[[Any], Any], batch: Any, leaf_types: Types) -> Any:
    """Return a copy of ``batch`` with ``fn`` applied to every object of ``leaf_types``.

    Handles dicts and other mappings, lists, tuples, namedtuples and dataclasses (frozen ones too); each keeps its type.
    Other objects are not copied. A container that is itself of ``leaf_types`` is a leaf.

    Args:
        fn: takes a leaf and returns its replacement.
        batch: any object.
        leaf_types: a class or several, as for `isinstance`.

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
    if isinstance(batch, list | tuple):
        items = (tree_map(fn, item, leaf_types) for item in batch)
        # a named tuple takes its fields one by one
        return kind(*items) if isinstance(batch, tuple) and hasattr(batch, "_fields") else kind(items)
    if isinstance(batch, Mapping):
        mapped = {key: tree_map(fn, value, leaf_types) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return kind(mapped)
        # a copy keeps what the type has besides its items: a default factory, attributes
        result = copy.copy(batch)
        result.update(mapped)
        return result
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _map_dataclass(fn, batch, leaf_types)
    return batch


def tree_leaves(batch: object, leaf_types: Types) -> Iterator[Any]:
    """Yield the objects of ``leaf_types`` in ``batch``, in the order of `tree_map`."""
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
            # a field without a default may be missing until it is set
            if hasattr(batch, field.name):
                yield from tree_leaves(getattr(batch, field.name), leaf_types)


def _map_dataclass(fn: Callable[[Any], Any], batch: Any, leaf_types: Types) -> Any:
    result = copy.copy(batch)
    for field in dataclasses.fields(batch):
        if hasattr(batch, field.name):
            # the setattr of object: a frozen dataclass refuses its own
            object.__setattr__(result, field.name, tree_map(fn, getattr(batch, field.name), leaf_types))
    classes = type(batch).__mro__
    for name in [*getattr(result, "__dict__", ())]:
        if any(isinstance(vars(kind).get(name), cached_property) for kind in classes):
            del result.__dict__[name]  # computed from the leaves before the map
    return result


# -- the plain form of a value --------------------------------------------------------------------------------


#: types that are kept as they are and have nothing inside
LEAVES: frozenset[type] = frozenset({type(None), bool, float, complex, str, torch.device, torch.dtype, torch.Size})
TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})


class NotPlain(TypeError):
    """Error for a value that `plain` cannot convert, and that a checkpoint therefore cannot contain.

    Attributes:
        value: the value without a plain form.
        keys: the path to it from the value that was passed.
    """

    def __init__(self, value: object, keys: tuple[Any, ...]) -> None:
        super().__init__(f"{described(value)} has no plain form")
        self.value = value
        self.keys = keys


def plain(value: object) -> Any:
    """Convert `value` to tensors, numbers and strings, in dicts, lists, tuples and sets. Containers are copied.

    A path becomes a string, an ``Enum`` its value, a ``Namespace``, dataclass or other mapping a dict, a NumPy number a
    Python number, an array a tensor, a named tuple a tuple, any other sequence a list.

    Raises:
        NotPlain: a value in it is a function, a class, or an object of another class.
    """
    return _plain(value, (), frozenset())


def classes_in(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (path, class) for each object in `value` that can be rebuilt from its class and the output of `plain`.

    Yields:
        The path of the object in the plain form, and ``"module:name"`` of its class. A path consists of keys, indices
        in sequences and elements of sets. The path of a key is the path of its item, preceded by None.
    """
    kind = type(value)
    if is_rebuildable(kind):
        yield at, f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, (Enum, os.PathLike, *_TEXTS)) or _is_omegaconfs(kind):
        return
    inner = _fields(value)
    if isinstance(inner, Mapping):
        for key, item in inner.items():
            step = plain(key)
            yield from classes_in(key, (None, *at, step))
            yield from classes_in(item, (*at, step))
    elif isinstance(inner, (set, frozenset)):
        for item in inner:
            yield from classes_in(item, (*at, plain(item)))
    elif isinstance(inner, Sequence):
        for place, item in enumerate(inner):
            yield from classes_in(item, (*at, place))


def is_rebuildable(kind: type) -> bool:
    """Return True if objects of a class can be rebuilt from the output of `plain`."""
    return (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, (Enum, PurePath))
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        or kind in (Namespace, frozenset)
        or _is_omegaconfs(kind)
    )


def _is_omegaconfs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "omegaconf" and kind.__name__ in ("DictConfig", "ListConfig")


def _fields(value: object) -> object:
    """Return the fields of a namespace or dataclass as a dict. Return any other value unchanged."""
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _plain(value: object, keys: tuple[Any, ...], around: frozenset[int]) -> Any:
    kind = type(value)
    if kind in LEAVES or kind in TENSORS or (type(value) is int and value.bit_length() < 64):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, keys, around)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if id(value) in around:  # it holds itself
        raise NotPlain(value, keys)
    around |= {id(value)}
    value = _fields(value)
    if isinstance(value, Mapping):
        items = list(value.items())
        return {_plain(key, (*keys, key), around): _plain(item, (*keys, key), around) for key, item in items}
    if isinstance(value, (tuple, set, frozenset)) or (isinstance(value, Sequence) and not isinstance(value, _TEXTS)):
        forms = [_plain(item, (*keys, place), around) for place, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return set(forms)
        return tuple(forms) if isinstance(value, tuple) else forms
    return _other(value, keys)


_TEXTS = (str, bytes, bytearray, memoryview)


def _other(value: object, keys: tuple[Any, ...]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        # Dates and long doubles have no plain equivalent.
        if type(number) in LEAVES or type(number) is int:
            return number
    elif numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.kind in "biufc":
            return torch.as_tensor(value)
    else:
        for base in (str, int, float):
            if isinstance(value, base) and type(value) is not base:
                return base(value)
        if can_be_read_back(value):
            return value
    raise NotPlain(value, keys)


def can_be_read_back(value: object) -> bool:
    """Save and load `value`. Return True if ``torch.load(weights_only=True)`` can read it."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError, ImportError):
        return False
    return True


def described(value: object) -> str:
    """Describe `value` for a message, for example as "the class torch.optim.Adam" or "a function"."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    cls = type(value)
    return "a " + f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in the attributes of other objects, down to ``depth`` levels."""
    # Objects may refer to one another in a circle.
    seen: set[int] = set()

    def found(value: object, depth: int) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
            return
        if not depth or id(value) in seen or isinstance(value, (str, bytes, type, ModuleType, nn.Module)):
            return
        items = list(value.values()) if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = list(value)
        if items is not None:
            seen.add(id(value))
            for item in list(items.values()) if isinstance(items, dict) else items:
                yield from found(item, depth - 1)

    return found(value, depth)
