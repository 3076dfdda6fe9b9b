"""Arguments for ``__init__``, from the hyperparameters in a checkpoint."""

from __future__ import annotations

import ast
import csv
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import update_wrapper
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.checkpoint.annotated import allowed_by, annotations_of, made, named, rebuilt
from lockstep.ground import plain_yaml
from lockstep.ground.device import is_there
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.tree import is_rebuildable


class HasHyperparameters(Protocol):
    """A class with hyperparameters in checkpoints, under these keys."""

    CHECKPOINT_HYPER_PARAMS_KEY: str
    CHECKPOINT_HYPER_PARAMS_NAME: str


# -- inner classes -------------------------------------------------------------------------------------------


MODULES_KEY = "hyper_parameters"
PAST_KEYS = ("hparams", "module_arguments")
"""Keys under which Lightning kept the hyperparameters of modules in 2019 and 2020."""

CLI_KEYS = ("_class_path", "_instantiator")
"""Keys that the command line adds to the hyperparameters: the chosen class, and the function that instantiated it."""


def without_cli_keys(cls: type, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as arguments of ``cls``: unchanged, or with objects in place of their descriptions.

    A checkpoint may name only classes that the program has imported, and each must match the annotation of its
    argument: loading imports nothing.

    Args:
        cls: the class to instantiate.
        saved: the checkpoint's hyperparameters.
        given: arguments that take precedence.

    Raises:
        MisconfigurationException: the checkpoint was made from a subclass, or names a class that is not imported.
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
    annotations = annotations_of(cls)
    inner = {}
    for key, value in saved.items():
        if key in given:
            continue
        # The command line saves plain forms of tuples, sets and dataclasses, which jsonargparse turns back into them.
        kinds = set(named(annotations.get(key)))
        values = {kind for kind in kinds if kind in (tuple, set) or is_rebuildable(kind)}
        others = all(kind.__module__ in ("builtins", "collections.abc") for kind in kinds - values)
        if any(_paths(value)) or (values and others and not kinds & {type, Callable}):
            inner[key] = value
    if not inner:
        return saved
    return {**saved, **_instantiated(cls, inner)}


def _instantiated(cls: type, described: dict[str, Any]) -> dict[str, Any]:
    """Return objects in place of their descriptions, as jsonargparse makes them for the arguments of ``cls``."""
    # jsonargparse would import any module that a description names, whose code would run
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
    parser.add_class_arguments(cls, "built", fail_untyped=False, skip=others, instantiate=False)
    built = parser.instantiate(parser.parse_object({"built": described})).built
    return {key: built[key] for key in described}


def _parameters(cls: type) -> Iterator[str]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for key in parser.add_class_arguments(cls, "built", fail_untyped=False):
        yield key.removeprefix("built.").split(".")[0]


def _paths(value: object) -> Iterator[str]:
    """Yield the class paths in a value, at any depth."""
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


CONTAINERS = ("Namespace", "DictConfig")
"""Classes of an argument that takes all hyperparameters at once."""

# -- objects from plain forms --------------------------------------------------------------------------------


def _as_they_were(cls: type, saved: dict[str, Any], noted: object, given: Collection[str]) -> dict[str, Any]:
    """Return saved hyperparameters as the original objects; warn about those that stay plain.

    Args:
        cls: the class; the annotations of its ``__init__`` name the classes that may be instantiated.
        saved: the hyperparameters in their plain forms.
        noted: their classes, as the checkpoint records them.
        given: names of arguments that the caller gives.

    Raises:
        MisconfigurationException: an object cannot be rebuilt.
    """
    if not isinstance(noted, dict):  # Lightning's checkpoints record no classes
        return saved
    found, annotations = dict(saved), annotations_of(cls)
    # paths of keys of a dict start with None
    names = {next((step for step in at if step is not None), None) for at in noted if isinstance(at, tuple)}
    for name in [name for name in saved if name in names and name not in given]:
        kept: set[str] = set()
        allowed = allowed_by(annotations.get(name))
        try:
            found[name] = rebuilt(saved[name], (name,), noted, allowed, kept)
        except Exception as error:  # a user's class, for example, may fail in any way
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: a checkpoint holds the plain form of each hyperparameter, and "
                f"the object cannot be made from it ({name}: {error}). Pass it: {cls.__name__}.load_from_checkpoint("
                f"path, {name}=...)."
            ) from error
        if kept:
            rank_zero_warn(
                f"{cls.__name__}.load_from_checkpoint: {name!r} held {' and '.join(sorted(kept))} and stays in its "
                "plain form, because no annotation names an imported class of that name, or a base of it. Annotate "
                f"the argument of {cls.__name__}.__init__ with it, or pass it: {cls.__name__}.load_from_checkpoint("
                f"path, {name}=...)."
            )
    return found


def _of_file(path: str | PathLike[str], saved: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a file; those equal to what a logger writes are taken from the checkpoint.

    Args:
        path: path of the file.
        saved: the checkpoint's hyperparameters as objects.
        plain: the same in their plain forms.
    """
    from lockstep.loggers.base import as_yaml

    found, written = _read_file(path), plain
    # a logger writes text for objects: an entry that nobody has edited stands for the checkpoint's object
    if not fspath(path).endswith(".csv"):
        import yaml  # type: ignore[import-untyped]  # installed: the file was read with it

        written = yaml.safe_load(as_yaml(saved))
    for name in [name for name in found if name in saved]:
        if repr(found[name]) == repr(written[name]):
            found[name] = saved[name]
    return {**{key: saved[key] for key in CLI_KEYS if key in saved}, **found}


# -- arguments -----------------------------------------------------------------------------------------------


def _taken(
    cls: type, parameters: Mapping[str, inspect.Parameter], whole: object, saved: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return the saved and given hyperparameters that ``__init__`` takes, in the form in which it takes them.

    Args:
        cls: the class.
        parameters: parameters of its ``__init__``.
        whole: name of the parameter, if any, that took a dict or Namespace with all hyperparameters.
        saved: hyperparameters from the checkpoint.
        given: hyperparameters from the caller, which take precedence.
    """
    if whole in parameters and whole != "kwargs":
        own = {key: value for key, value in given.items() if key in parameters}
        return {str(whole): _container(cls, str(whole), {**saved, **given}), **own}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return {**saved, **given}
    for name in [key for key in given if key not in parameters]:  # a warning and not an error, as in Lightning
        rank_zero_warn(
            f"{cls.__name__}.load_from_checkpoint({name}=...): {cls.__name__}.__init__ takes no argument of that name, "
            "and it is ignored."
        )
    return {key: value for key, value in {**saved, **given}.items() if key in parameters}


def _container(cls: type, name: str, values: dict[str, Any]) -> Any:
    """Return all hyperparameters as one argument: a Namespace or DictConfig if its annotation names that class."""
    kinds = [kind for kind in allowed_by(annotations_of(cls).get(name)) if kind.__name__ in CONTAINERS]
    return made(kinds[0], values) if kinds else AttributeDict(values)


def init_arguments(
    cls: type[HasHyperparameters],
    checkpoint: dict[str, Any],
    hparams_file: str | PathLike[str] | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """Return the keyword arguments to instantiate ``cls`` with.

    Args:
        cls: the class; its CHECKPOINT_HYPER_PARAMS_KEY and CHECKPOINT_HYPER_PARAMS_NAME are the keys of its
            hyperparameters.
        checkpoint: a loaded checkpoint.
        hparams_file: a YAML or CSV file with hyperparameters that replace the checkpoint's.
        given: arguments that take precedence over the saved ones, and complete them.

    Raises:
        MisconfigurationException: ``__init__`` needs an argument that is in neither, or one cannot be rebuilt.
    """
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if key == MODULES_KEY and key not in checkpoint:
        key = next((past for past in PAST_KEYS if isinstance(checkpoint.get(past), dict)), key)
    plain = dict(checkpoint.get(key) or {})
    saved = _as_they_were(cls, plain, checkpoint.get(f"{key}_classes"), given)
    if hparams_file is not None:
        saved = _of_file(hparams_file, saved, plain)
    saved = without_cli_keys(cls, saved, given)
    parameters = inspect.signature(cls.__init__).parameters
    found = _taken(cls, parameters, checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME), saved, given)
    # checked here, because the TypeError of the call would not show the way out
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = list(parameters.values())[1:]  # without self
    needed = [each.name for each in own if each.kind in by_name and each.default is each.empty]
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise MisconfigurationException(
            f"{cls.__name__}.__init__ needs {', '.join(map(repr, lacking))}, which the checkpoint does not hold "
            f"(hyperparameters in it: {sorted(map(str, found))}). Pass it: {cls.__name__}.load_from_checkpoint(path, "
            f"{lacking[0]}=...)."
        )
    return found


def _read_file(path: str | PathLike[str]) -> dict[str, Any]:
    kind = fspath(path).rpartition(".")[2].lower()
    if kind == "csv":
        with open(path, newline="", encoding="utf-8") as file:
            return {row[0]: _word(row[1]) for row in list(csv.reader(file))[1:] if row}
    if kind not in ("yml", "yaml"):
        raise MisconfigurationException(
            f"load_from_checkpoint(hparams_file={fspath(path)!r}): unknown kind of file; give one whose name ends in "
            ".yaml, .yml or .csv."
        )
    try:
        found = plain_yaml.read(path)
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "load_from_checkpoint(hparams_file=...)") from None
    except ValueError as error:
        raise MisconfigurationException(f"load_from_checkpoint(hparams_file={fspath(path)!r}): {error}.") from None
    return dict(found or {})


def _word(text: str) -> Any:
    """Return the value of a CSV cell: a Python literal, else its text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def where_there_is_a_device(storage: Any, location: str) -> Any:
    """Move tensors of a device type that this machine lacks to the CPU; a ``map_location`` for ``torch.load``."""
    kind = location.partition(":")[0]
    return None if kind == "meta" or is_there(kind) else storage.cpu()


# -- load_from_checkpoint is called on the class --------------------------------------------------------------


if TYPE_CHECKING:
    restricted_classmethod = classmethod  # type checkers know it
else:

    class restricted_classmethod:
        """A ``classmethod`` that raises if it is called on an instance, because its result is a new object.

        Example::

            class Model:
                @restricted_classmethod
                def load(cls, path): ...

            model = Model.load(path)  # not model.load(path), which would leave `model` unchanged
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
                    f"{name} returns a new object and does not change the one that it is called on: call it on the "
                    f"class, `object = {name}(...)`."
                )

            return refuse
