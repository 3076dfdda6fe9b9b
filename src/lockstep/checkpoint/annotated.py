"""Rebuilding of objects from the plain hyperparameters in a checkpoint and the recorded class names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pathlib
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from lockstep.ground.hyperparameters import is_same
from lockstep.ground.tree import is_rebuildable

_HOLD_VALUES = ("pathlib", "argparse", "builtins", "omegaconf")
"""Packages whose classes contain only values, and may be instantiated without an annotation."""


def annotations_of(cls: type) -> dict[str, Any]:
    """Return {argument: annotation} for the ``__init__`` methods of a class and its base classes."""
    found: dict[str, Any] = {}
    for kind in cls.__mro__:  # a subclass's annotation of an argument wins over that of its base
        init: Any = inspect.unwrap(vars(kind).get("__init__", object.__init__))
        found = {**_hints(init, getattr(init, "__globals__", {})), **found}
    return found


def rebuild(
    value: Any, at: tuple[Any, ...], recorded: Mapping[Any, Any], allowed: list[type], refused: set[str]
) -> Any:
    """Rebuild an object and the objects nested in it, innermost first, from their plain form in a checkpoint.

    Args:
        value: the plain form, as `lockstep.ground.tree.plain` returns it.
        at: path to the value in the hyperparameters, as in `lockstep.ground.tree.classes_in`.
        recorded: the classes that the checkpoint records, by path.
        allowed: the user's classes that may be instantiated; see `allowed_by`.
        refused: receives the names of recorded classes that are not allowed; their objects stay plain.

    Raises:
        Exception: the object cannot be rebuilt. The error may be of any class, because the user's code runs.
    """
    if isinstance(value, dict):
        value = type(value)(
            (
                rebuild(key, (None, *at, key), recorded, allowed, refused),
                rebuild(item, (*at, key), recorded, allowed, refused),
            )
            for key, item in value.items()
        )
    elif type(value) in (list, tuple):
        value = type(value)(rebuild(item, (*at, place), recorded, allowed, refused) for place, item in enumerate(value))
    elif isinstance(value, set):
        value = {rebuild(item, (*at, item), recorded, allowed, refused) for item in value}
    if at not in recorded:
        return value
    kind = _find_class(str(recorded[at]), allowed)
    if kind is None:
        refused.add(str(recorded[at]).partition(":")[2])
        return value
    return instantiate(kind, value)


def instantiate(kind: Any, value: Any) -> Any:
    """Instantiate a class from the plain form of an object."""
    if kind.__module__.partition(".")[0] == "omegaconf":
        return sys.modules["omegaconf"].OmegaConf.create(value)
    if kind is Namespace:
        return Namespace(**value)
    if dataclasses.is_dataclass(kind):
        return _rebuild_dataclass(kind, value)
    if issubclass(kind, tuple):
        return kind(*value)
    return pathlib.Path(value) if kind in (pathlib.PosixPath, pathlib.WindowsPath) else kind(value)


def _rebuild_dataclass(kind: Any, values: dict[str, Any]) -> Any:
    """Instantiate a dataclass from saved values, and undo what ``__post_init__`` changes in those values."""
    others = {field.name for field in dataclasses.fields(kind) if not field.init}
    # copies, because `__post_init__` may change them in place, and they are compared below
    built = kind(**copy.deepcopy({name: value for name, value in values.items() if name not in others}))
    changed = [name for name, value in values.items() if not is_same(getattr(built, name), value)]
    own = set(getattr(built, "__dict__", {})) - set(values)
    if changed and own:
        raise TypeError(
            f"{kind.__name__}.__post_init__ changes the field {changed[0]!r} a second time when the object is "
            f"rebuilt, so the attribute {min(own)!r}, which is not a field, may be wrong"
        )
    for name in changed:
        object.__setattr__(built, name, values[name])  # a frozen dataclass refuses setattr
    return built


# -- allowed classes -------------------------------------------------------------------------------------------


def _hints(owner: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function or class; omit annotations that cannot be resolved."""
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(owner).items():
        with suppress(Exception):  # a user's expression, which may fail in any way
            found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), names)
    return found


def allowed_by(annotation: object) -> list[type]:
    """Return the classes that a checkpoint may instantiate for an argument with this annotation.

    They are the classes named in the annotation, the classes of their fields, and all imported subclasses of both.
    """
    found = dict.fromkeys(classes_in(annotation))
    waiting = list(found)
    for kind in waiting:
        # not `kind.__subclasses__()`, which needs an argument if `kind` is a metaclass
        inner: list[type] = type.__subclasses__(kind)
        for base in kind.__mro__ if is_rebuildable(kind) else ():
            names = {**vars(sys.modules.get(base.__module__, types)), base.__name__: base}
            inner += [each for hint in _hints(base, names).values() for each in classes_in(hint)]
        waiting += [each for each in dict.fromkeys(inner) if each not in found]
        found |= dict.fromkeys(inner)
    return [kind for kind in found if is_rebuildable(kind)]


def classes_in(annotation: object) -> Iterator[type]:
    """Yield every class that is named in an annotation, including nested type arguments."""
    origin = typing.get_origin(annotation)
    kind = annotation if origin is None else origin
    if isinstance(annotation, Enum):  # in a Literal
        yield type(annotation)
    elif isinstance(kind, type) and kind not in (object, type) and kind.__module__ not in ("typing", "types"):
        yield kind
    for inner in typing.get_args(annotation):
        yield from classes_in(inner)


def _find_class(recorded: str, allowed: list[type]) -> type | None:
    """Return the class recorded as ``module:name``, or None if no allowed class matches.

    A class from a different module is accepted if only one has the name, because a script that ran as ``__main__`` may
    be imported now.
    """
    module, _, name = recorded.partition(":")
    package = module.partition(".")[0]
    if package in _HOLD_VALUES:
        known = getattr(sys.modules.get(package), name, None)
        return known if isinstance(known, type) and is_rebuildable(known) else None
    found = [kind for kind in allowed if kind.__qualname__ == name]
    found = [kind for kind in found if kind.__module__ == module] or found
    # a notebook's cell that ran twice has defined a class twice
    return found[-1] if len({kind.__module__ for kind in found}) == 1 else None
