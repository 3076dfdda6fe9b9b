"""From a checkpoint's hyperparameters to the arguments of the ``__init__`` that they came from."""

from __future__ import annotations

import ast
import collections.abc
import csv
import dataclasses
import difflib
import importlib
import inspect
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import update_wrapper
from os import PathLike, fspath
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lockstep.ground import plain_yaml
from lockstep.ground.device import is_there
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.rank import rank_zero_warn

T = TypeVar("T")


class HasHyperparameters(Protocol):
    """A class whose hyperparameters are in checkpoints, under these keys."""

    CHECKPOINT_HYPER_PARAMS_KEY: str
    CHECKPOINT_HYPER_PARAMS_NAME: str


# -- inner classes -------------------------------------------------------------------------------------------


MODULES_KEY = "hyper_parameters"
PAST_KEYS = ("hparams", "module_arguments")
"""Where Lightning kept the hyperparameters of modules in 2019 and 2020."""

CLI_KEYS = ("_class_path", "_instantiator")
"""What the command line records among the hyperparameters: the class where it was chosen, and who made it."""


def without_cli_keys(cls: type, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as arguments of ``cls``: as they are, or with objects in place of their descriptions.

    A checkpoint may name only classes that the program has imported, and each must be what the annotation of its
    argument asks for: loading imports nothing.

    Args:
        cls: what is to be made.
        saved: the checkpoint's hyperparameters.
        given: arguments that go before them.

    Raises:
        MisconfigurationException: the checkpoint is one of a subclass, or names a class that is not imported.
        ModuleNotFoundError: there are inner classes, and jsonargparse is not installed.
    """
    if not any(key in saved for key in CLI_KEYS):
        return saved
    kind = _imported(str(saved.get("_class_path", "")))
    if kind is not None and kind is not cls and issubclass(kind, cls):
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: the checkpoint was made of a subclass; call "
            f"{kind.__name__}.load_from_checkpoint."
        )
    saved = {key: value for key, value in saved.items() if key not in CLI_KEYS}
    inner = {key: value for key, value in saved.items() if key not in given and any(_paths(value))}
    if not inner:
        return saved
    return {**saved, **_instantiated(cls, inner)}


def _instantiated(cls: type, described: dict[str, Any]) -> dict[str, Any]:
    """Objects in place of their descriptions, as jsonargparse makes them for the arguments of ``cls``."""
    for path in _paths(described):
        if _imported(path) is None:
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: the checkpoint asks for an object of the class {path!r}, which "
                "this program has not imported; import it first if you trust the checkpoint."
            )
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError:
        raise missing_extra(
            "jsonargparse", "cli", f"{cls.__name__}.load_from_checkpoint, with inner classes,"
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    others = {name for name in _parameters(cls) if name not in described}
    parser.add_class_arguments(cls, "built", fail_untyped=False, skip=others)
    built = parser.instantiate(parser.parse_object({"built": described}), instantiate_groups=False).built
    return {key: built[key] for key in described}


def _parameters(cls: type) -> Iterator[str]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for key in parser.add_class_arguments(cls, "built", fail_untyped=False):
        yield key.removeprefix("built.").split(".")[0]


def _paths(value: object) -> Iterator[str]:
    """The classes that a value describes, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths(item)


def _imported(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


# -- what annotations name -----------------------------------------------------------------------------------


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


def _resolved(annotation: object, names: dict[str, Any]) -> Any:
    """What an annotation stands for; it may be a string, as under ``from __future__ import annotations``."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=names)["it"]
    except Exception:  # a user's expression, which may fail in any way
        return None


def rebuilt(value: object, annotation: object) -> Any:
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
    return _built(value, kind) if isinstance(kind, type) and type(value) is not kind else value


def _of_union(value: object, kinds: tuple[Any, ...]) -> Any:
    if any(isinstance(kind, type) and type(value) is kind for kind in kinds):
        return value
    for kind in kinds:
        try:
            built = rebuilt(value, kind)
        except (TypeError, ValueError):
            continue
        if built is not value:
            return built
    return value


def _of_items(value: Collection[Any], origin: object, inside: tuple[Any, ...]) -> Any:
    if origin is tuple:
        kinds = [inside[0]] * len(value) if inside[-1] is ... else list(inside)
        return tuple(map(rebuilt, value, kinds)) if len(kinds) == len(value) else value
    items = [rebuilt(item, inside[0]) for item in value]
    if origin in _SETS:
        return frozenset(items) if origin is frozenset else set(items)
    return items if origin in _SEQUENCES else value


def _named_tuple(value: Sequence[Any], kind: Any) -> Any:
    """A named tuple of a class; the value itself where it has another number of members."""
    hints = _hints(kind)
    fields: tuple[str, ...] = kind._fields
    if len(fields) != len(value):
        return value
    return kind(*(rebuilt(item, hints.get(name)) for name, item in zip(fields, value, strict=True)))


def _built(value: object, kind: type) -> Any:
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
        return _named_tuple(value, kind)
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
    built = kind(**{name: item for name, item in values.items() if fields[name].init})
    for name, item in values.items():
        if not fields[name].init:
            object.__setattr__(built, name, item)
    return built


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


# -- arguments -----------------------------------------------------------------------------------------------


def _taken(
    cls: type, parameters: Mapping[str, inspect.Parameter], whole: object, saved: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Those of the saved and given hyperparameters that ``__init__`` takes, in the form in which it takes them.

    Args:
        cls: of the ``__init__``.
        parameters: of it.
        whole: the one of them, if any, that took a dict or Namespace with all hyperparameters.
        saved, given: hyperparameters.
    """
    if whole in parameters and whole != "kwargs":
        own = {key: value for key, value in given.items() if key in parameters}
        return {str(whole): AttributeDict({**saved, **given}), **own}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return {**saved, **given}
    _say_left_out(cls, [key for key in given if key not in parameters], list(parameters)[1:])
    return {key: value for key, value in {**saved, **given}.items() if key in parameters}


def init_arguments(
    cls: type[HasHyperparameters],
    checkpoint: dict[str, Any],
    hparams_file: str | PathLike[str] | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """The keyword arguments to make ``cls`` with.

    Args:
        cls: has CHECKPOINT_HYPER_PARAMS_KEY and CHECKPOINT_HYPER_PARAMS_NAME, which say where its
            hyperparameters are.
        checkpoint: a loaded checkpoint.
        hparams_file: a YAML or CSV file whose hyperparameters stand in for the checkpoint's.
        given: arguments that go before the saved ones, and complete them.

    Raises:
        MisconfigurationException: ``__init__`` needs an argument that is in neither.
    """
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if key == MODULES_KEY and key not in checkpoint:
        key = next((past for past in PAST_KEYS if isinstance(checkpoint.get(past), dict)), key)
    saved = dict(checkpoint.get(key) or {})
    if hparams_file is not None:
        saved = _read_file(hparams_file)
    saved = without_cli_keys(cls, saved, given)
    parameters = inspect.signature(cls.__init__).parameters
    found = _taken(cls, parameters, checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME), saved, given)
    _check_complete(cls, list(parameters.values())[1:], found)
    try:
        rebuilt = rebuilt_arguments(cls, {name: value for name, value in found.items() if name not in given})
    except TypeError as error:
        name = str(error).partition(":")[0]
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: a checkpoint holds the plain form of each hyperparameter, and the "
            f"object that the annotation names cannot be made of it ({error}). Give it: {cls.__name__}."
            f"load_from_checkpoint(path, {name}=...)."
        ) from error
    return {**found, **rebuilt}


def make(cls: type[T], arguments: dict[str, Any], given: dict[str, Any]) -> T:
    """``cls(**arguments)``; where that fails, an error that says which of them were given as their plain forms.

    Raises:
        MisconfigurationException: with what to give.
    """
    build: Callable[..., T] = cls
    try:
        return build(**arguments)
    except (AttributeError, TypeError, KeyError) as error:
        plain = [
            name for name, value in arguments.items() if isinstance(value, (dict, list, tuple)) and name not in given
        ]
        if not plain:
            raise
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: {cls.__name__}.__init__ failed ({type(error).__name__}: {error}). A "
            f"checkpoint holds hyperparameters in their plain form, and {', '.join(map(repr, plain))} came back as "
            f"{type(arguments[plain[0]]).__name__}: annotate the argument with its class, a dataclass say, and it is "
            f"made again, or give it: {cls.__name__}.load_from_checkpoint(path, {plain[0]}=...)."
        ) from error


def _say_left_out(cls: type, names: list[str], known: list[str]) -> None:
    """As in Lightning, an argument that ``__init__`` does not take is left out; but not without a word."""
    for name in names:
        near = difflib.get_close_matches(name, known, 1)
        rank_zero_warn(
            f"{cls.__name__}.load_from_checkpoint({name}=...): {cls.__name__}.__init__ takes no argument of that name, "
            f"which is left out{f'; is {near[0]!r} meant?' if near else '.'}"
        )


def _check_complete(cls: type, parameters: list[inspect.Parameter], found: dict[str, Any]) -> None:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [each.name for each in parameters if each.kind in by_name and each.default is each.empty]
    lacking = [name for name in lacking if name not in found]
    if lacking:
        raise MisconfigurationException(
            f"{cls.__name__}.__init__ needs {', '.join(map(repr, lacking))}, which the checkpoint does not hold "
            f"(hyperparameters in it: {sorted(map(str, found))}). Give it: {cls.__name__}.load_from_checkpoint(path, "
            f"{lacking[0]}=...)."
        )


def _read_file(path: str | PathLike[str]) -> dict[str, Any]:
    kind = fspath(path).rpartition(".")[2].lower()
    if kind == "csv":
        try:
            with open(path, newline="", encoding="utf-8") as file:
                return {row[0]: _word(row[1]) for row in list(csv.reader(file))[1:] if row}
        except (UnicodeDecodeError, IndexError, csv.Error) as error:
            raise MisconfigurationException(
                f"load_from_checkpoint(hparams_file={fspath(path)!r}): it is no table of names and values ({error})."
            ) from None
    if kind not in ("yml", "yaml"):
        raise MisconfigurationException(
            f"load_from_checkpoint(hparams_file={fspath(path)!r}): its name does not say what it is; it ends in .yaml, "
            ".yml or .csv."
        )
    try:
        found = plain_yaml.read(path)
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "load_from_checkpoint(hparams_file=...)") from None
    except ValueError as error:
        raise MisconfigurationException(f"load_from_checkpoint(hparams_file={fspath(path)!r}): {error}.") from None
    if not isinstance(found or {}, dict):
        raise MisconfigurationException(
            f"load_from_checkpoint(hparams_file={fspath(path)!r}): it holds no names with values."
        )
    return dict(found or {})


def _word(text: str) -> Any:
    """A cell of a CSV file: a literal of Python's, else text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def where_there_is_a_device(storage: Any, location: str) -> Any:
    """A ``map_location`` of ``torch.load``: tensors of a kind of device that this machine lacks go to the CPU."""
    kind = location.partition(":")[0]
    return None if kind == "meta" or is_there(kind) else storage.cpu()


# -- load_from_checkpoint is called on the class --------------------------------------------------------------


if TYPE_CHECKING:
    restricted_classmethod = classmethod  # which type checkers know
else:

    class restricted_classmethod:
        """Like ``classmethod``; a call on an instance raises, because its result is a new object.

        Example::

            class Model:
                @restricted_classmethod
                def load(cls, path): ...

            model = Model.load(path)  # and not model.load(path), which would leave `model` as it is
        """

        def __init__(self, method: Callable[..., Any]) -> None:
            self.method = method
            update_wrapper(self, method)

        def __get__(self, instance: object, kind: type) -> Callable[..., Any]:
            if instance is None:
                return self.method.__get__(kind)

            def refuse(*args: object, **kwargs: object) -> Any:
                name = f"{kind.__name__}.{self.method.__name__}"
                raise TypeError(
                    f"{name} makes a new object and leaves the one that it is called on as it is: call it on the "
                    f"class, `object = {name}(...)`."
                )

            return refuse
