"""From a checkpoint's hyperparameters to the arguments of the ``__init__`` that they came from."""

from __future__ import annotations

import ast
import csv
import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lockstep.checkpoint.annotated import Rebuilding, annotations_of, argument_at
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


# -- objects again -------------------------------------------------------------------------------------------


def _rebuilding(saved: dict[str, Any], noted: object, given: dict[str, Any], from_file: bool) -> Rebuilding:
    """How saved hyperparameters become objects.

    Args:
        saved: of the checkpoint.
        noted: the classes that the checkpoint notes of them; None for one of Lightning's, or of lockstep before it did.
        given: arguments that go before them, and stay as they are.
        from_file: whether others stand in for them, of a file.
    """
    parsed = any(key in saved for key in CLI_KEYS)
    notes = noted if isinstance(noted, dict) and not parsed else None
    return Rebuilding(
        classes={at: kind for at, kind in (notes or {}).items() if argument_at(at) not in given},
        complete=notes is not None and not from_file,
        text=from_file or parsed,
        computed=not parsed,
    )


def _rebuilt_arguments(cls: type, saved: dict[str, Any], whole: object, rebuilding: Rebuilding) -> dict[str, Any]:
    """Saved hyperparameters as the objects that they were, as far as the annotations of ``cls.__init__`` tell.

    Raises:
        MisconfigurationException: one cannot be made, which it names.
    """
    annotations, found = annotations_of(cls), {}
    for name, value in saved.items():
        try:
            found[name] = rebuilding.made(value, annotations.get(name), () if name == whole != "kwargs" else (name,))
        except (TypeError, ValueError, RecursionError) as error:
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: a checkpoint holds the plain form of each hyperparameter, and "
                f"the object that the annotation names cannot be made of it ({name}: {error}). Give it: "
                f"{cls.__name__}.load_from_checkpoint(path, {name}=...)."
            ) from error
    _say_not_sure(cls, rebuilding)
    return found


def _say_not_sure(cls: type, rebuilding: Rebuilding) -> None:
    for name, was in rebuilding.left.items():
        rank_zero_warn(
            f"{cls.__name__}.load_from_checkpoint: {name!r} held a {was}, which comes back in its plain form, as no "
            f"annotation names the class: annotate the argument of {cls.__name__}.__init__ with it, or give it: "
            f"{cls.__name__}.load_from_checkpoint(path, {name}=...)."
        )
    for name, kinds in rebuilding.doubtful.items():
        rank_zero_warn(
            f"{cls.__name__}.load_from_checkpoint: {name!r} may have held any of {', '.join(kinds)}, which have the "
            f"same fields, and is taken for the first. Where that is wrong, give it: {cls.__name__}."
            f"load_from_checkpoint(path, {name}=...)."
        )


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
) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments to make ``cls`` with; and those of them that may be other than they were.

    Args:
        cls: has CHECKPOINT_HYPER_PARAMS_KEY and CHECKPOINT_HYPER_PARAMS_NAME, which say where its
            hyperparameters are.
        checkpoint: a loaded checkpoint.
        hparams_file: a YAML or CSV file whose hyperparameters stand in for the checkpoint's.
        given: arguments that go before the saved ones, and complete them.

    Raises:
        MisconfigurationException: ``__init__`` needs an argument that is in neither, or one cannot be made again.
    """
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if key == MODULES_KEY and key not in checkpoint:
        key = next((past for past in PAST_KEYS if isinstance(checkpoint.get(past), dict)), key)
    saved = dict(checkpoint.get(key) or {})
    rebuilding = _rebuilding(saved, checkpoint.get(f"{key}_classes"), given, hparams_file is not None)
    if hparams_file is not None:
        saved = _read_file(hparams_file)
    saved = without_cli_keys(cls, saved, given)
    parameters = inspect.signature(cls.__init__).parameters
    whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    found = _taken(cls, parameters, whole, saved, given)
    _check_complete(cls, list(parameters.values())[1:], found)
    plain = {name: value for name, value in found.items() if name not in given}
    rebuilt = _rebuilt_arguments(cls, plain, whole, rebuilding)
    return {**found, **rebuilt}, [name for name in rebuilt if _is_suspect(name, plain[name], rebuilt[name], rebuilding)]


def _is_suspect(name: str, saved: object, rebuilt: object, rebuilding: Rebuilding) -> bool:
    """Whether an argument may be other than it was: left plain, or made of a class that only its annotation tells."""
    if rebuilding.complete:
        return name in rebuilding.left
    return isinstance(rebuilt, (dict, list, tuple)) or rebuilt is not saved


def make(cls: type[T], arguments: dict[str, Any], suspects: list[str]) -> T:
    """``cls(**arguments)``; where that fails, an error that says which of them may be other than they were.

    Args:
        cls: what is made.
        arguments, suspects: as of `init_arguments`.

    Raises:
        MisconfigurationException: with what to give.
    """
    build: Callable[..., T] = cls
    try:
        return build(**arguments)
    except (AttributeError, TypeError, KeyError) as error:
        if not suspects:
            raise
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: {cls.__name__}.__init__ failed ({type(error).__name__}: {error}). A "
            f"checkpoint holds hyperparameters in their plain form, and {', '.join(map(repr, suspects))} came back as "
            f"{type(arguments[suspects[0]]).__name__}: annotate the argument with its class, a dataclass say, and it "
            f"is made again, or give it: {cls.__name__}.load_from_checkpoint(path, {suspects[0]}=...)."
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
