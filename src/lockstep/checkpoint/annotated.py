"""Plain values as the objects that they were: of the class that a checkpoint notes, or that an annotation names."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import importlib
import inspect
import pathlib
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.tree import is_made_again

At = tuple[Any, ...]
"""The way to a value, as `lockstep.ground.tree.classes_in` tells it: first the argument's name."""

_UNIONS = (typing.Union, types.UnionType)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)
_PYTHONS = ("builtins", "typing", "collections.abc", "types")
"""Modules of annotations that ask for no class in particular."""

# -- what annotations name -----------------------------------------------------------------------------------


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


def _resolved(annotation: object, names: dict[str, Any]) -> Any:
    """What an annotation stands for; it may be a string, as under ``from __future__ import annotations``."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=names)["it"]
    except Exception:  # a user's expression, which may fail in any way
        return None


def _hints(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules.get(base.__module__, types))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            found[name] = _resolved(annotation, {**names, base.__name__: base})
    return found


def _classes(annotation: object) -> Iterator[type]:
    """The classes that an annotation names, at any depth."""
    origin = typing.get_origin(annotation)
    kind = annotation if origin is None else origin
    if isinstance(annotation, Enum):  # in a Literal
        yield type(annotation)
    elif isinstance(kind, type) and kind not in (types.UnionType, types.NoneType):
        yield kind
    for inner in typing.get_args(annotation):
        yield from _classes(inner)


# -- what a checkpoint notes ---------------------------------------------------------------------------------


def _known(module: str, name: str) -> type | None:
    """A class of Python's or OmegaConf's, which holds values and no code: it needs no annotation."""
    package = module.partition(".")[0]
    if package == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        found: type = getattr(pathlib, name)
        return found
    if package == "omegaconf" and name in ("DictConfig", "ListConfig"):
        here: type | None = getattr(sys.modules.get("omegaconf"), name, None)
        return here
    return {("argparse", "Namespace"): Namespace, ("builtins", "frozenset"): frozenset}.get((module, name))


def _by_name(named: list[type], module: str, name: str) -> type | None:
    """The class of a name among some and their subclasses.

    What ran as ``__main__`` may be imported today, so that a class of another module will do, if there is but one.
    """
    found = [kind for kind in _with_subclasses(named) if kind.__qualname__ == name and is_made_again(kind)]
    exact = [kind for kind in found if kind.__module__ == module] or found
    if not exact or len({kind.__module__ for kind in exact}) > 1:
        return None
    return exact[-1]  # a notebook's cell that ran twice has defined it twice


def _with_subclasses(named: list[type]) -> list[type]:
    """Classes and what derives from them; a class that is named itself comes last."""
    found: dict[type, None] = {}
    waiting = [kind for kind in named if kind is not object]
    while waiting:
        kind = waiting.pop(0)
        if kind not in found:
            found[kind] = None
            waiting += type.__subclasses__(kind)
    return [kind for kind in found if kind not in named] + named


# -- objects again -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rebuilding:
    """How plain values become the objects that they were.

    Dataclasses, ``Enum``, paths, named tuples, ``Namespace``, frozen sets, OmegaConf's containers, and lists, tuples,
    sets and dicts of these.

    Args:
        classes: those that the checkpoint notes, by the way to the value.
        complete: whether what has no note was a plain value, and stays one; else its annotation decides, in a union
            the first that fits.
        text: whether the values were written as text, which has lists for tuples and sets, and names for the members
            of an ``Enum``.
        computed: whether the fields of dataclasses have the values that ``__post_init__`` has left, and not those that
            ``__init__`` was given.

    Attributes:
        left: arguments with a value that is left plain, and of which class it was.
        doubtful: arguments with a value that fits several classes, and these; the first was taken.
    """

    classes: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    complete: bool = False
    text: bool = False
    computed: bool = True
    left: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    doubtful: dict[str, list[str]] = dataclasses.field(default_factory=dict, init=False)

    def made(self, value: object, annotation: object, at: At) -> Any:
        """The object that a value was.

        Args:
            value: its plain form.
            annotation: of the argument, or of what holds the value; None: there is none.
            at: the way to it; empty for an argument that took all hyperparameters at once.

        Raises:
            TypeError, ValueError: the class cannot be told, or the object cannot be made of the value.
        """
        noted = None if self.text and value is None else self.classes.get(at)
        if noted is not None:
            try:
                kind = self._noted(str(noted), annotation, at)
                if kind is not None:
                    return self._of_kind(value, kind, annotation, at)
            except (TypeError, ValueError):
                if not self.text:  # a file may have been edited
                    raise
        if self.complete and at:
            return self._inside(value, annotation, at)
        return self._as_annotated(value, annotation, at)

    def _noted(self, noted: str, annotation: object, at: At) -> type | None:
        """The class that is noted; None where no annotation asks for a class."""
        module, _, name = noted.partition(":")
        named = list(_classes(annotation))
        found = _known(module, name) or _by_name(named, module, name)
        asked = [kind.__name__ for kind in named if kind.__module__ not in _PYTHONS]
        if found is None and asked:
            raise TypeError(f"it was a {name}, which is not {' or '.join(asked)}, and no imported subclass")
        if found is None:
            self.left.setdefault(argument_at(at), name)
        return found

    def _inside(self, value: Any, annotation: object, at: At) -> Any:
        """A plain container, whose members may be of noted classes; it stays a list, or a tuple, as it is."""
        if type(value) in (dict, AttributeDict):
            return type(value)(self._items(value, annotation, annotation, at))
        if type(value) in (list, tuple):
            return type(value)([self.made(item, annotation, (*at, place)) for place, item in enumerate(value)])
        if isinstance(value, set):
            return {self.made(item, annotation, (*at, item)) for item in value}
        return value

    def _items(self, value: Any, of_keys: object, of_values: object, at: At) -> dict[Any, Any]:
        return {
            self.made(key, of_keys, (None, *at, key)): self.made(item, of_values, (*at, key))
            for key, item in value.items()
        }

    def _as_annotated(self, value: object, annotation: object, at: At) -> Any:
        origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._as_annotated(value, inside[0], at)
        if origin in _UNIONS:
            return self._of_union(value, inside, at)
        if type(value) in (list, tuple, set) and inside and origin is not None:
            return self._of_members(value, origin, inside, at)
        if isinstance(value, Mapping) and len(inside) == 2 and origin is not None:
            return self._items(value, inside[0], inside[1], at)
        kind = annotation if origin is None else origin
        if isinstance(kind, type) and is_made_again(kind):
            return self._of_kind(value, kind, None, at)
        return self._inside(value, annotation, at) if self.classes else value

    def _of_union(self, value: object, kinds: tuple[Any, ...], at: At) -> Any:
        if any(isinstance(kind, type) and type(value) is kind for kind in kinds):
            return value
        fitting = []
        for kind in kinds:
            try:
                built = self._as_annotated(value, kind, at)
            except (TypeError, ValueError):
                continue
            if built is not value:
                fitting.append(built)
        names = list(dict.fromkeys(type(built).__name__ for built in fitting))
        if len(names) > 1 and type(fitting[0]) is not type(value):
            self.doubtful[argument_at(at)] = names
        return fitting[0] if fitting else value

    def _of_members(self, value: Any, origin: object, inside: tuple[Any, ...], at: At) -> Any:
        """A list, tuple or set whose members the annotation names."""
        kinds = [inside[0]] * len(value)
        if origin is tuple and inside[-1] is not ...:
            kinds = list(inside)
        if len(kinds) != len(value) or origin not in (tuple, *_SEQUENCES, *_SETS):
            return value
        places = value if isinstance(value, set) else range(len(value))
        members = [self.made(item, kind, (*at, at_)) for item, kind, at_ in zip(value, kinds, places, strict=True)]
        container: Any = type(value)
        if origin is frozenset:
            container = frozenset
        elif self.text:
            container = tuple if origin is tuple else set if origin in _SETS else list
        return container(members)

    def _of_kind(self, value: object, kind: Any, annotation: object, at: At) -> Any:
        """An object of a class, made of its plain form; the value itself where it is another form, or the object."""
        if isinstance(value, kind):
            return value
        if issubclass(kind, Enum):
            named = self.text and isinstance(value, str) and value in kind.__members__
            return kind[value] if named else kind(value)
        if issubclass(kind, pathlib.PurePath):
            here = pathlib.Path if kind in (pathlib.PosixPath, pathlib.WindowsPath) else kind
            return here(value) if isinstance(value, str) else value
        if not isinstance(value, (Mapping, list, tuple, set)):
            return value
        if kind.__module__.partition(".")[0] == "omegaconf":
            return importlib.import_module("omegaconf").OmegaConf.create(value)
        if isinstance(value, Mapping):
            return self._of_fields(value, kind, at)
        return self._of_sequence(value, kind, annotation, at)

    def _of_fields(self, value: Mapping[str, Any], kind: Any, at: At) -> Any:
        """A dataclass or Namespace."""
        if kind is Namespace:
            return Namespace(**self._items(value, None, None, at))
        if not hasattr(kind, "__dataclass_fields__"):
            return value
        hints = _hints(kind)
        takes = {field.name: field.init for field in dataclasses.fields(kind)}
        _check_fields(kind, value, takes)
        values = {name: self.made(item, hints.get(name), (*at, name)) for name, item in value.items()}
        given = {name: item for name, item in values.items() if takes[name]}
        try:
            built = kind(**copy.deepcopy(given))  # `__post_init__` may change what it is given
        except Exception as error:  # a user's code, which may fail in any way
            raise TypeError(f"{kind.__name__} was not made of the values that it had: {error}") from error
        return _with_fields(built, {name: item for name, item in values.items() if self.computed or name not in given})

    def _of_sequence(self, value: Sequence[Any] | set[Any], kind: Any, annotation: object, at: At) -> Any:
        """A frozen set or named tuple; the value itself where it has another number of members."""
        if kind is frozenset:
            return frozenset(self._inside(value, annotation, at))
        fields: tuple[str, ...] = getattr(kind, "_fields", ())
        if isinstance(value, set) or len(fields) != len(value):
            return value
        hints = _hints(kind)
        return kind(*(self.made(value[i], hints.get(name), (*at, i)) for i, name in enumerate(fields)))


def _check_fields(kind: type, value: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")


def argument_at(at: object) -> str:
    """The argument that a way to a value begins with."""
    steps = at if isinstance(at, tuple) else ()
    return str(next((step for step in steps if step is not None), ""))


def _with_fields(built: Any, values: dict[str, Any]) -> Any:
    """A dataclass with fields as they were, where its ``__post_init__`` has computed with them once more.

    Raises:
        TypeError: it has other attributes, too, which may have been computed of the wrong values.
    """
    changed = [name for name, value in values.items() if not _same(getattr(built, name, values), value)]
    names = {field.name for field in dataclasses.fields(built)}
    others = [name for name in getattr(built, "__dict__", {}) if name not in names]
    if changed and others:
        raise TypeError(
            f"{type(built).__name__}.__post_init__ computes {changed[0]!r} of what it has computed before, so that "
            f"its attribute {others[0]!r}, which is no field, may be wrong"
        )
    for name in changed:
        object.__setattr__(built, name, values[name])
    return built


def _same(one: object, other: object) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # of tensors and arrays
        return False
