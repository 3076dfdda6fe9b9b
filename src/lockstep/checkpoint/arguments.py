"""Arguments for ``__init__`` that `load_from_checkpoint` reads from the hyperparameters in a checkpoint."""

from __future__ import annotations

import ast
import csv
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import update_wrapper
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.checkpoint.annotated import allowed_by, annotations_of, classes_in, instantiate, rebuild
from lockstep.ground import plain_yaml
from lockstep.ground.device import is_there
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.tree import is_rebuildable


class HasHyperparameters(Protocol):
    """Protocol of classes whose attributes name the keys of the hyperparameters in a checkpoint."""

    CHECKPOINT_HYPER_PARAMS_KEY: str
    CHECKPOINT_HYPER_PARAMS_NAME: str


# -- inner classes -------------------------------------------------------------------------------------------


MODULES_KEY = "hyper_parameters"
PAST_KEYS = ("hparams", "module_arguments")
"""Keys under which Lightning saved the hyperparameters of modules in 2019 and 2020."""

CLI_KEYS = ("_class_path", "_instantiator")
"""Keys that the command line adds to the hyperparameters: the chosen class, and the function that instantiated it."""


def without_cli_keys(cls: type, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Remove LightningCLI's keys from saved hyperparameters, and instantiate values that are saved as class paths.

    Hyperparameters without these keys are returned unchanged.

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
            f"{cls.__name__}.load_from_checkpoint: the checkpoint is from a subclass. Call "
            f"{kind.__name__}.load_from_checkpoint."
        )
    saved = {key: value for key, value in saved.items() if key not in CLI_KEYS}
    annotations = annotations_of(cls)
    inner = {}
    for key, value in saved.items():
        if key in given:
            continue
        # The command line saves plain forms of tuples, sets and dataclasses, which jsonargparse turns back into them.
        kinds = set(classes_in(annotations.get(key)))
        values = {kind for kind in kinds if kind in (tuple, set) or is_rebuildable(kind)}
        others = all(kind.__module__ in ("builtins", "collections.abc") for kind in kinds - values)
        if any(_paths(value)) or (values and others and not kinds & {type, Callable}):
            inner[key] = value
    if not inner:
        return saved
    return {**saved, **_instantiated(cls, inner)}


def _instantiated(cls: type, described: dict[str, Any]) -> dict[str, Any]:
    """Instantiate with jsonargparse the arguments of ``cls`` that are saved as ``class_path`` and ``init_args``."""
    # jsonargparse would import any module that a description names, whose code would run
    for path in _paths(described):
        if _imported(path) is None:
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: the checkpoint names the class {path!r}, which this program has "
                "not imported. Import the class before loading if you trust the checkpoint."
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
    """Yield the value of every ``class_path`` key in nested dicts and lists."""
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
"""Names of the classes, besides dict, that one argument with all hyperparameters may have."""

# -- objects from plain forms --------------------------------------------------------------------------------


def _rebuild_objects(cls: type, saved: dict[str, Any], recorded: object, given: Collection[str]) -> dict[str, Any]:
    """Rebuild the original objects from saved hyperparameters. Warn about classes that may not be instantiated.

    Args:
        cls: the class; the annotations of its ``__init__`` name the classes that may be instantiated.
        saved: the hyperparameters in their plain forms.
        recorded: the names of the hyperparameters' classes, from the checkpoint, by path.
        given: names of arguments that the caller passes.

    Raises:
        MisconfigurationException: an object cannot be rebuilt.
    """
    if not isinstance(recorded, dict):  # Lightning's checkpoints record no classes
        return saved
    found, annotations = dict(saved), annotations_of(cls)
    # paths of keys of a dict start with None
    names = {next((step for step in at if step is not None), None) for at in recorded if isinstance(at, tuple)}
    for name in [name for name in saved if name in names and name not in given]:
        refused: set[str] = set()
        allowed = allowed_by(annotations.get(name))
        try:
            found[name] = rebuild(saved[name], (name,), recorded, allowed, refused)
        except Exception as error:  # a user's class, for example, may fail in any way
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: the hyperparameter {name!r} cannot be rebuilt from its saved "
                f"values ({error}). Pass the object: {cls.__name__}.load_from_checkpoint(path, {name}=...)."
            ) from error
        if refused:
            rank_zero_warn(
                f"{cls.__name__}.load_from_checkpoint: the hyperparameter {name!r} was saved with objects of "
                f"{' and '.join(sorted(refused))}, but is loaded as plain values, because the argument's annotation "
                "does not name the class, or the class is not imported. Annotate the argument of "
                f"{cls.__name__}.__init__ with the class, or pass the object: "
                f"{cls.__name__}.load_from_checkpoint(path, {name}=...)."
            )
    return found


def _read_hparams(path: str | PathLike[str], saved: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Read hyperparameters from a file, which may be an edited copy of the checkpoint's.

    For each entry that was not edited, the object in the checkpoint is used.

    Args:
        path: path of the file.
        saved: the checkpoint's hyperparameters as objects.
        plain: the checkpoint's hyperparameters in their plain forms.
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


def _select_arguments(
    cls: type, parameters: Mapping[str, inspect.Parameter], whole: object, saved: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Merge saved and passed hyperparameters into arguments for ``__init__``.

    A passed hyperparameter that is no argument of ``__init__`` is dropped with a warning.

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
            f"{cls.__name__}.load_from_checkpoint({name}=...): {cls.__name__}.__init__ has no argument {name!r}; the "
            "value is ignored."
        )
    return {key: value for key, value in {**saved, **given}.items() if key in parameters}


def _container(cls: type, name: str, values: dict[str, Any]) -> Any:
    """Return all hyperparameters as one object, of the class in the argument's annotation or `AttributeDict`."""
    kinds = [kind for kind in allowed_by(annotations_of(cls).get(name)) if kind.__name__ in CONTAINERS]
    return instantiate(kinds[0], values) if kinds else AttributeDict(values)


def init_arguments(
    cls: type[HasHyperparameters],
    checkpoint: dict[str, Any],
    hparams_file: str | PathLike[str] | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """Return the keyword arguments with which `load_from_checkpoint` instantiates ``cls``.

    Args:
        cls: the class; its CHECKPOINT_HYPER_PARAMS_KEY and CHECKPOINT_HYPER_PARAMS_NAME are the keys of its
            hyperparameters.
        checkpoint: a loaded checkpoint.
        hparams_file: a YAML or CSV file with hyperparameters that replace the checkpoint's.
        given: arguments from the caller, which take precedence over saved ones and are added to them.

    Raises:
        MisconfigurationException: a required argument of ``__init__`` is not available, or cannot be rebuilt.
    """
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if key == MODULES_KEY and key not in checkpoint:
        key = next((past for past in PAST_KEYS if isinstance(checkpoint.get(past), dict)), key)
    plain = dict(checkpoint.get(key) or {})
    saved = _rebuild_objects(cls, plain, checkpoint.get(f"{key}_classes"), given)
    if hparams_file is not None:
        saved = _read_hparams(hparams_file, saved, plain)
    saved = without_cli_keys(cls, saved, given)
    parameters = inspect.signature(cls.__init__).parameters
    found = _select_arguments(cls, parameters, checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME), saved, given)
    # checked here, because the TypeError of the call would not show the way out
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = list(parameters.values())[1:]  # without self
    needed = [each.name for each in own if each.kind in by_name and each.default is each.empty]
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise MisconfigurationException(
            f"{cls.__name__}.__init__ requires {', '.join(map(repr, lacking))}, but the checkpoint's "
            f"hyperparameters are {sorted(map(str, saved))}. Pass the missing argument: "
            f"{cls.__name__}.load_from_checkpoint(path, {lacking[0]}=...). To store the arguments in later "
            "checkpoints, call `self.save_hyperparameters()` in `__init__`."
        )
    return found


def _read_file(path: str | PathLike[str]) -> dict[str, Any]:
    kind = fspath(path).rpartition(".")[2].lower()
    if kind == "csv":
        with open(path, newline="", encoding="utf-8") as file:
            return {row[0]: _parse_cell(row[1]) for row in list(csv.reader(file))[1:] if row}
    if kind not in ("yml", "yaml"):
        raise MisconfigurationException(
            f"load_from_checkpoint(hparams_file={fspath(path)!r}): unknown file type. Pass a file whose name ends in "
            ".yaml, .yml or .csv."
        )
    try:
        found = plain_yaml.read(path)
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "load_from_checkpoint(hparams_file=...)") from None
    except ValueError as error:
        raise MisconfigurationException(f"load_from_checkpoint(hparams_file={fspath(path)!r}): {error}.") from None
    return dict(found or {})


def _parse_cell(text: str) -> Any:
    """Convert the text of a CSV cell to a Python value. Return the text if it is not a Python literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def where_there_is_a_device(storage: Any, location: str) -> Any:
    """Move a loaded storage to the CPU if this machine has no device of its type.

    For use as ``map_location`` of ``torch.load``.
    """
    kind = location.partition(":")[0]
    return None if kind == "meta" or is_there(kind) else storage.cpu()


# -- load_from_checkpoint is called on the class --------------------------------------------------------------


if TYPE_CHECKING:
    restricted_classmethod = classmethod  # type checkers know it
else:

    class restricted_classmethod:
        """A ``classmethod`` that returns a new object, and therefore raises if it is called on an instance.

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
                    f"{name} returns a new object and does not change the instance that it is called on. Call it on "
                    f"the class: `object = {name}(...)`."
                )

            return refuse
