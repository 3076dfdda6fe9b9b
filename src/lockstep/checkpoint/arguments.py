"""From a checkpoint's hyperparameters to the arguments of the ``__init__`` that they came from."""

from __future__ import annotations

import ast
import csv
import inspect
from os import PathLike, fspath
from typing import Any

import torch

from lockstep.checkpoint.annotated import rebuilt_arguments
from lockstep.checkpoint.nested import without_notes
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.rank import rank_zero_warn


def init_arguments(
    cls: Any, checkpoint: dict[str, Any], hparams_file: str | PathLike[str] | None, given: dict[str, Any]
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
    saved = dict(checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    if hparams_file is not None:
        saved = _read_file(hparams_file)
    saved = without_notes(cls, saved, given)
    whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    parameters = inspect.signature(cls.__init__).parameters
    if whole in parameters and whole != "kwargs":  # __init__ took one dict or Namespace that held them all
        own = {key: value for key, value in given.items() if key in parameters}
        found = {str(whole): AttributeDict({**saved, **given}), **own}
    elif any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        found = {**saved, **given}
    else:
        found = {**{key: value for key, value in saved.items() if key in parameters}, **given}
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


def make(cls: Any, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """``cls(**arguments)``; where that fails, an error that says which of them were given as their plain forms.

    Raises:
        MisconfigurationException: with what to give.
    """
    try:
        return cls(**arguments)
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


def _check_complete(cls: Any, parameters: list[inspect.Parameter], found: dict[str, Any]) -> None:
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
        with open(path, newline="", encoding="utf-8") as file:
            return {row[0]: _word(row[1]) for row in list(csv.reader(file))[1:] if row}
    if kind not in ("yml", "yaml"):
        raise MisconfigurationException(
            f"load_from_checkpoint(hparams_file={fspath(path)!r}): its name does not say what it is; it ends in .yaml, "
            ".yml or .csv."
        )
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "load_from_checkpoint(hparams_file=...)") from None
    with open(path, encoding="utf-8") as file:
        return dict(yaml.safe_load(file) or {})


def _word(text: str) -> Any:
    """A cell of a CSV file: a literal of Python's, else text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def load_weights(module: Any, weights: dict[str, Any], strict: bool | None) -> None:
    """Put `weights` into a LightningModule.

    Args:
        module: where to.
        weights: a state dict.
        strict: whether the names must match; None: as the module's ``strict_loading`` says. Without, what is only on
            one side is told by a warning.

    Raises:
        MisconfigurationException: the module has set ``strict_loading`` to the contrary.
    """
    if strict is not None and module._strict_loading not in (None, strict):
        raise MisconfigurationException(
            f"load_from_checkpoint(strict={strict}): {type(module).__name__} has set strict_loading = "
            f"{module._strict_loading}; leave `strict` out, or set both to the same."
        )
    strict = module.strict_loading if strict is None else strict
    keys = module.load_state_dict(weights, strict=strict)
    if not strict and keys is not None:
        for names, where in (
            (keys.missing_keys, "in the module and not in the checkpoint, and stay as they were made"),
            (keys.unexpected_keys, "in the checkpoint and not in the module, and are left out"),
        ):
            if names:
                rank_zero_warn(f"{type(module).__name__}: weights that are {where}: {', '.join(names)}.")


def where_there_is_a_device(storage: Any, location: str) -> Any:
    """A ``map_location`` of ``torch.load``: tensors of a kind of device that this machine lacks go to the CPU."""
    lacks_cuda = location.startswith("cuda") and not torch.cuda.is_available()
    lacks_mps = location.startswith("mps") and not torch.backends.mps.is_available()
    return storage.cpu() if lacks_cuda or lacks_mps else None
