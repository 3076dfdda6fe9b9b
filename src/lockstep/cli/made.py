"""Objects made from what was parsed, and the parsed values noted as their hyperparameters."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from lockstep.cli.needed import jsonargparse
from lockstep.ground.hyperparameters import given_hyperparameters

NOTE = "lockstep.cli.instantiate_module"
"""What hyperparameters of the command line have under ``_instantiator``: who makes a module from them."""


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Make an object from ``{"class_path": ..., "init_args": ...}``.

    Args:
        args: the first positional argument, or a tuple of several.
        init: the class and its keyword arguments.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **init.get("init_args", {}))


def instantiate_module(class_type: type, config: dict[str, Any]) -> Any:
    """Make a module or data module from hyperparameters that the command line has saved, nested classes too.

    Args:
        class_type: the class, or a base of the one that ``_class_path`` names.
        config: what ``hparams`` of a checkpoint holds.

    ``MyModel.load_from_checkpoint`` does so by itself, and refuses classes that are not imported; this imports them.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    values = {key: value for key, value in config.items() if key not in ("_class_path", "_instantiator")}
    if "_class_path" in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": config["_class_path"], "dict_kwargs": values}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    return parser.instantiate(parser.parse_object({"module": values})).module


def class_of(builder: Any) -> Any:
    """A class, or what a function is annotated to return."""
    if isinstance(builder, type):
        return builder
    return inspect.signature(builder, eval_str=True).return_annotation


def hyperparameters(dumped: dict[str, Any], links: dict[str, Any], key: str) -> dict[str, Any]:
    """What ``save_hyperparameters`` is to keep of one class of the config.

    Args:
        dumped: the config as plain values.
        links: values that links gave when classes were made, by dotted key.
        key: "model" or "data".
    """
    found = dict(dumped.get(key) or {})
    if "class_path" in found:
        whole = {**(found.get("init_args") or {}), **(found.get("dict_kwargs") or {})}
        found = {"_class_path": found["class_path"], **whole}
    for name, value in links.items():
        if name.startswith(f"{key}."):
            *parents, last = name.removeprefix(f"{key}.").removeprefix("init_args.").split(".")
            place = found
            for parent in parents:
                place = place[parent]
            place[last] = value
    return {**found, "_instantiator": NOTE}


class Noting:
    """Makes the objects of one class of the config for jsonargparse, their hyperparameters being what was parsed.

    Args:
        cli: the LightningCLI, whose config is dumped when the first object is made.
        key: "model" or "data".
    """

    def __init__(self, cli: Any, key: str) -> None:
        self.cli = cli
        self.key = key

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        noted = hyperparameters(self.cli.config_dump, applied_instantiation_links, self.key)
        token = given_hyperparameters.set(noted)
        try:
            return class_type(*args, **kwargs)
        finally:
            given_hyperparameters.reset(token)
