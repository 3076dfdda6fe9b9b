"""From the plain form of a hyperparameter back to what the annotation of its argument names."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)


def annotations_of(cls: type) -> dict[str, Any]:
    """The annotations of the arguments that ``__init__`` takes, those that it passes on to base classes included.

    One that cannot be resolved, of a name that is imported for type checkers only say, is left out.
    """
    found: dict[str, Any] = {}
    for kind in cls.__mro__:
        init = vars(kind).get("__init__")
        if init is None:
            continue
        for name, annotation in getattr(inspect.unwrap(init), "__annotations__", {}).items():
            if name not in found and name != "return":
                with_names = getattr(inspect.unwrap(init), "__globals__", {})
                found[name] = _resolved(annotation, with_names)
    return {name: annotation for name, annotation in found.items() if annotation is not None}


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """What an annotation stands for; it may be a string, as under ``from __future__ import annotations``."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=names)["it"]
    except Exception:  # a user's expression, which may fail in any way
        return None


def rebuilt(value: Any, annotation: Any) -> Any:
    """``value`` as ``annotation`` asks for it, if it is the plain form of that; as it is, if it is not.

    Dataclasses, ``Enum``, paths, named tuples, ``Namespace``, OmegaConf's containers, and lists, tuples, sets and dicts
    of these; in a union the first that fits.

    Raises:
        TypeError, ValueError: what the annotation names cannot be made of it.
    """
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return rebuilt(value, inside[0])
    if origin in _UNIONS:
        return _of_union(value, inside)
    if isinstance(value, (list, tuple, set)) and inside and origin is not None:
        return _of_items(value, origin, inside)
    if isinstance(value, Mapping) and len(inside) == 2 and origin is not None:
        return {rebuilt(key, inside[0]): rebuilt(item, inside[1]) for key, item in value.items()}
    kind = annotation if origin is None else origin
    return _made(value, kind) if isinstance(kind, type) and type(value) is not kind else value


def _of_union(value: Any, kinds: tuple[Any, ...]) -> Any:
    if any(isinstance(kind, type) and type(value) is kind for kind in kinds):
        return value
    for kind in kinds:
        try:
            made = rebuilt(value, kind)
        except (TypeError, ValueError):
            continue
        if made is not value:
            return made
    return value


def _of_items(value: Any, origin: Any, inside: tuple[Any, ...]) -> Any:
    if origin is tuple:
        kinds = [inside[0]] * len(value) if inside[-1] is ... else list(inside)
        return tuple(map(rebuilt, value, kinds)) if len(kinds) == len(value) else value
    items = [rebuilt(item, inside[0]) for item in value]
    if origin in _SETS:
        return frozenset(items) if origin is frozenset else set(items)
    return items if origin in _SEQUENCES else value


def _made(value: Any, kind: type) -> Any:
    """An object of a class, made of the plain form that it has had; the value itself where that is another one."""
    if isinstance(value, Mapping):
        if dataclasses.is_dataclass(kind):
            return _dataclass(value, kind)
        if kind is Namespace:
            return Namespace(**value)
    if issubclass(kind, Enum) and not isinstance(value, (dict, set)):
        return kind(value)
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and isinstance(value, (list, tuple)):
        hints = _hints(kind)
        fields: tuple[str, ...] = kind._fields
        if len(fields) == len(value):
            return kind(*(rebuilt(item, hints.get(name)) for name, item in zip(fields, value, strict=True)))
    if kind.__module__.partition(".")[0] == "omegaconf" and kind.__name__ in ("DictConfig", "ListConfig"):
        return importlib.import_module("omegaconf").OmegaConf.create(value)
    return value


def _dataclass(value: Mapping[str, Any], kind: type) -> Any:
    """A dataclass of its fields; those that ``__init__`` does not take are set as they were."""
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    values = {name: rebuilt(item, hints.get(name)) for name, item in value.items()}
    made = kind(**{name: item for name, item in values.items() if fields[name].init})
    for name, item in values.items():
        if not fields[name].init:
            object.__setattr__(made, name, item)
    return made


def _hints(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules.get(base.__module__, types))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            found[name] = _resolved(annotation, {**names, base.__name__: base})
    return found


def rebuilt_arguments(cls: type, saved: dict[str, Any]) -> dict[str, Any]:
    """Saved hyperparameters as the annotations of ``cls.__init__`` ask for them.

    Raises:
        TypeError, ValueError: of the first one that cannot be made, which is its ``args[0]``'s beginning.
    """
    annotations, found = annotations_of(cls), {}
    for name, value in saved.items():
        try:
            found[name] = rebuilt(value, annotations.get(name))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: {error}") from error
    return found
