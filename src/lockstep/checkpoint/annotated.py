"""Objects rebuilt from a checkpoint's plain hyperparameters, with the classes that it records."""

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
"""Packages with classes that hold values and no code, so that they need no annotation."""


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotations of the arguments of ``cls.__init__`` and of those that it passes to base classes."""
    found: dict[str, Any] = {}
    for kind in cls.__mro__:  # a subclass's annotation of an argument wins over that of its base
        init: Any = inspect.unwrap(vars(kind).get("__init__", object.__init__))
        found = {**_hints(init, getattr(init, "__globals__", {})), **found}
    return found


def rebuilt(value: Any, at: tuple[Any, ...], noted: Mapping[Any, Any], allowed: list[type], kept: set[str]) -> Any:
    """Rebuild an object from its plain form, nested objects first.

    Args:
        value: the plain form, as `lockstep.ground.tree.plain` made it.
        at: the path to it, as in `lockstep.ground.tree.classes_in`.
        noted: the classes that the checkpoint records, by path.
        allowed: the user's classes that may be instantiated; see `allowed_by`.
        kept: receives the names of recorded classes that are not allowed; their objects stay plain.

    Raises:
        Exception: the object cannot be rebuilt; the user's code may run, so of any class.
    """
    if isinstance(value, dict):
        value = type(value)(
            (rebuilt(key, (None, *at, key), noted, allowed, kept), rebuilt(item, (*at, key), noted, allowed, kept))
            for key, item in value.items()
        )
    elif type(value) in (list, tuple):
        value = type(value)(rebuilt(item, (*at, place), noted, allowed, kept) for place, item in enumerate(value))
    elif isinstance(value, set):
        value = {rebuilt(item, (*at, item), noted, allowed, kept) for item in value}
    if at not in noted:
        return value
    kind = _class(str(noted[at]), allowed)
    if kind is None:
        kept.add(str(noted[at]).partition(":")[2])
        return value
    return made(kind, value)


def made(kind: Any, value: Any) -> Any:
    """Return an object of a class, made from its plain form."""
    if kind.__module__.partition(".")[0] == "omegaconf":
        return sys.modules["omegaconf"].OmegaConf.create(value)
    if kind is Namespace:
        return Namespace(**value)
    if dataclasses.is_dataclass(kind):
        return _of_fields(kind, value)
    if issubclass(kind, tuple):
        return kind(*value)
    return pathlib.Path(value) if kind in (pathlib.PosixPath, pathlib.WindowsPath) else kind(value)


def _of_fields(kind: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass and restore its fields, which ``__post_init__`` may have computed again."""
    others = {field.name for field in dataclasses.fields(kind) if not field.init}
    # copies, because `__post_init__` may change them in place, and they are compared below
    built = kind(**copy.deepcopy({name: value for name, value in values.items() if name not in others}))
    changed = [name for name, value in values.items() if not is_same(getattr(built, name), value)]
    own = set(getattr(built, "__dict__", {})) - set(values)
    if changed and own:
        raise TypeError(
            f"{kind.__name__}.__post_init__ computes {changed[0]!r} from its own earlier result, so that its "
            f"attribute {min(own)!r}, which is not a field, may be wrong"
        )
    for name in changed:
        object.__setattr__(built, name, values[name])  # a frozen dataclass refuses setattr
    return built


# -- allowed classes -------------------------------------------------------------------------------------------


def _hints(owner: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function or class, without those that cannot be resolved."""
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(owner).items():
        with suppress(Exception):  # a user's expression, which may fail in any way
            found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), names)
    return found


def allowed_by(annotation: object) -> list[type]:
    """Return the classes that an annotation names, those of their fields, and the imported subclasses of all these."""
    found = dict.fromkeys(named(annotation))
    waiting = list(found)
    for kind in waiting:
        # not `kind.__subclasses__()`, which needs an argument if `kind` is a metaclass
        inner: list[type] = type.__subclasses__(kind)
        for base in kind.__mro__ if is_rebuildable(kind) else ():
            names = {**vars(sys.modules.get(base.__module__, types)), base.__name__: base}
            inner += [each for hint in _hints(base, names).values() for each in named(hint)]
        waiting += [each for each in dict.fromkeys(inner) if each not in found]
        found |= dict.fromkeys(inner)
    return [kind for kind in found if is_rebuildable(kind)]


def named(annotation: object) -> Iterator[type]:
    """Yield the classes that an annotation names, at any depth."""
    origin = typing.get_origin(annotation)
    kind = annotation if origin is None else origin
    if isinstance(annotation, Enum):  # in a Literal
        yield type(annotation)
    elif isinstance(kind, type) and kind not in (object, type) and kind.__module__ not in ("typing", "types"):
        yield kind
    for inner in typing.get_args(annotation):
        yield from named(inner)


def _class(noted: str, allowed: list[type]) -> type | None:
    """Return the class of a recorded name.

    A class of another module is accepted if there is only one: what ran as ``__main__`` may be imported now.
    """
    module, _, name = noted.partition(":")
    package = module.partition(".")[0]
    if package in _HOLD_VALUES:
        known = getattr(sys.modules.get(package), name, None)
        return known if isinstance(known, type) and is_rebuildable(known) else None
    found = [kind for kind in allowed if kind.__qualname__ == name]
    found = [kind for kind in found if kind.__module__ == module] or found
    # a notebook's cell that ran twice has defined a class twice
    return found[-1] if len({kind.__module__ for kind in found}) == 1 else None
