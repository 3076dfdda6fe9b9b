"""From a checkpoint's hyperparameters to the arguments of the ``__init__`` that they came from."""

from __future__ import annotations

import inspect
from os import PathLike
from typing import Any

from lockstep.ground.errors import missing_extra
from lockstep.ground.hyperparameters import AttributeDict


def init_arguments(
    cls: Any, checkpoint: dict[str, Any], hparams_file: str | PathLike[str] | None, given: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments to make ``cls`` with.

    Args:
        cls: has CHECKPOINT_HYPER_PARAMS_KEY and CHECKPOINT_HYPER_PARAMS_NAME, which say where its
            hyperparameters are.
        checkpoint: a loaded checkpoint.
        hparams_file: a YAML file whose hyperparameters stand in for the checkpoint's.
        given: arguments that go before the saved ones, and complete them.
    """
    saved = dict(checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    if hparams_file is not None:
        saved = _read_yaml(hparams_file)
    whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    parameters = inspect.signature(cls.__init__).parameters
    if whole in parameters and whole != "kwargs":  # __init__ took one dict or Namespace that held them all
        return given if whole in given else {str(whole): AttributeDict({**saved, **given})}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return {**saved, **given}
    return {**{key: value for key, value in saved.items() if key in parameters}, **given}


def _read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "load_from_checkpoint(hparams_file=...)") from None
    with open(path, encoding="utf-8") as file:
        return dict(yaml.safe_load(file) or {})
