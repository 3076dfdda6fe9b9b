"""LightningArgumentParser: jsonargparse's parser, with methods that add the arguments of a class."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Union

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.callbacks.base import Callback
from lockstep.datamodule import LightningDataModule
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.module import LightningModule
from lockstep.names.class_paths import FACES, to_lockstep_paths
from lockstep.names.finder import ROOT
from lockstep.trainer import Trainer

__all__ = ["docstring_parser", "jsonargparse", "yaml"]


try:
    import docstring_parser
    import jsonargparse
    import yaml  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise missing_extra(str(error.name or "jsonargparse"), "cli", "lockstep.cli") from None


# torch's classes are defined in other modules than the public ones that configs name.
jsonargparse.register_unresolvable_import_paths(torch)
if find_spec("fsspec") is not None:
    jsonargparse.set_parsing_settings(config_read_mode_fsspec_enabled=True)

PARSER_MODE = "lockstep"
"""Mode of our parsers: YAML whose class names are looked up in lockstep first. Other parsers are unaffected."""


def _load(text: str) -> Any:
    return to_lockstep_paths(jsonargparse.get_loader("yaml")(text))


jsonargparse.set_loader(PARSER_MODE, _load, (yaml.YAMLError,))


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Variant of torch's ``ReduceLROnPlateau`` with an argument for the metric to monitor, for use in configs.

    Args:
        optimizer: optimizer whose learning rate is reduced.
        monitor: name of a logged metric.
        *args: arguments of torch's class.
        **kwargs: arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# Of the two classes of this name, the command line takes the one above.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007

ArgsType = Union[list[str], dict[str, Any], jsonargparse.Namespace, None]  # noqa: UP007
"""Type of ``LightningCLI(args=...)``: words of a command line, or a config."""

OptimizerCallable = Callable[[Iterable], Optimizer]
"""Type of a module's argument that creates an optimizer from parameters."""

LRSchedulerCallable = Callable[[Optimizer], LRSchedulerTypeUnion]
"""Type of a module's argument that creates a scheduler from an optimizer."""

Registered = dict[str, tuple[Any, str]]
"""Class (or tuple of base classes) and linked argument, by key of the config."""


class LightningArgumentParser(jsonargparse.ArgumentParser):
    """Parser for command lines, config files and environment variables.

    Args:
        *args: arguments of `jsonargparse.ArgumentParser`.
        description: first line of ``--help``.
        env_prefix: prefix of environment variables.
        default_env: read environment variables.
        **kwargs: arguments of `jsonargparse.ArgumentParser`.

    Example::

        parser = LightningArgumentParser()
        parser.add_lightning_class_args(Net, "model")
        config = parser.parse_args(["--model.lr", "0.1"])
    """

    def __init__(
        self,
        *args: Any,
        description: str = "lockstep Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        mode = kwargs.pop("parser_mode", "yaml")
        if mode in ("yaml", PARSER_MODE):
            mode = PARSER_MODE
        else:
            # Configs in other modes, such as omegaconf, are not read by `_load`: their classes must be imported before.
            _import_all()
        kwargs |= {"env_prefix": env_prefix, "default_env": default_env, "parser_mode": mode}
        super().__init__(*args, description=description, **kwargs)
        self.callback_keys: list[str] = []
        self._optimizers: Registered = {}
        self._lr_schedulers: Registered = {}

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: jsonargparse.Namespace | None = None, **kwargs: Any
    ) -> jsonargparse.Namespace:
        """Parse a command line. Arguments as for `jsonargparse.ArgumentParser.parse_args`.

        Args:
            args: words of the command line; None for the arguments of this process.
            namespace: values of arguments that are not on the command line.
            kwargs: further arguments of that method.

        Returns:
            the parsed values.

        Raises:
            SystemExit: the command line is invalid.
        """
        words = sys.argv[1:] if args is None else args
        try:
            words = [_known_word(word) if isinstance(word, str) else word for word in words]
        except TypeError as error:
            self.error(str(error), error)
        return super().parse_args(words, namespace, **kwargs)

    def add_lightning_class_args(
        self, lightning_class: Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, LightningModule, LightningDataModule or Callback as a group.

        Args:
            lightning_class: the class, or a function whose return type is a class.
            nested_key: key of the group in the config.
            subclass_mode: accept any subclass, by ``class_path`` and ``init_args``.
            required: with ``subclass_mode``, whether a class must be given.

        Returns:
            The added keys.

        Raises:
            MisconfigurationException: the class is not derived from any of these four.
        """
        if callable(lightning_class) and not isinstance(lightning_class, type):
            lightning_class = jsonargparse.class_from_function(lightning_class)
        kinds = (Trainer, LightningModule, LightningDataModule, Callback)
        if not isinstance(lightning_class, type) or not issubclass(lightning_class, kinds):
            raise MisconfigurationException(
                f"add_lightning_class_args({lightning_class!r}, {nested_key!r}): the class must be a Trainer, "
                "LightningModule, LightningDataModule or Callback, or a function that is annotated to return one."
            )
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        # The CLI creates the Trainer itself, because it adds callbacks.
        instantiate = not issubclass(lightning_class, Trainer)
        return self.add_class_arguments(
            lightning_class, nested_key, fail_untyped=False, instantiate=instantiate, sub_configs=True
        )

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of an optimizer as a group.

        Args:
            optimizer_class: the class, or a tuple of classes whose subclasses are accepted.
            nested_key: key of the group in the config.
            link_to: argument of the model that receives class and arguments as a dict; "AUTOMATIC": the CLI creates
                the optimizer, and ``configure_optimizers`` returns it.

        Raises:
            MisconfigurationException: a class is not derived from ``torch.optim.Optimizer``.
        """
        self._add(optimizer_class, (Optimizer,), nested_key, {"params"})
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type | tuple[type, ...] = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a learning rate scheduler as a group.

        Arguments as for :meth:`add_optimizer_args`. Classes must be derived from ``LRScheduler`` or
        ``ReduceLROnPlateau``.

        Raises:
            MisconfigurationException: a class is not derived from either of these.
        """
        self._add(lr_scheduler_class, LRSchedulerTypeTuple, nested_key, {"optimizer"})
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add(self, kind: type | tuple[type, ...], bases: tuple[type, ...], key: str, skip: set[str | int]) -> None:
        for each in kind if isinstance(kind, tuple) else (kind,):
            if not (isinstance(each, type) and issubclass(each, bases)):
                names = " or ".join(base.__name__ for base in bases)
                raise MisconfigurationException(f"Argument group {key!r}: {each!r} is not a subclass of {names}.")
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, key, instantiate=False, fail_untyped=False, skip=skip)
        else:
            self.add_class_arguments(kind, key, instantiate=False, fail_untyped=False, skip=skip, sub_configs=True)

    def link_registered(self) -> None:
        """Link each optimizer or scheduler added with ``link_to`` to the model argument that ``link_to`` names."""
        for key, (kind, link_to) in {**self._optimizers, **self._lr_schedulers}.items():
            if link_to == "AUTOMATIC":
                continue
            if isinstance(kind, tuple):
                self.link_arguments(key, link_to)
            else:
                self.link_arguments(key, link_to, compute_fn=_with_class(kind))

    def automatic(self) -> tuple[list[str], list[str]]:
        """Return (keys of the optimizers, keys of the schedulers) that the CLI itself creates."""
        registers = (self._optimizers, self._lr_schedulers)
        optimizers, schedulers = ([k for k, (_, to) in each.items() if to == "AUTOMATIC"] for each in registers)
        return optimizers, schedulers

    def class_and_arguments(self, key: str, parsed: object) -> Any:
        """Return the parsed value of an optimizer or scheduler, including its class path.

        If the user cannot choose the class, ``class_path`` is added.

        Args:
            key: key of the group in the config.
            parsed: parsed value of the group.
        """
        kind, _ = {**self._optimizers, **self._lr_schedulers}[key]
        return parsed if isinstance(kind, tuple) else _with_class(kind)(parsed)


def _known_word(word: str) -> str:
    """Replace Lightning's class path in a command-line argument by lockstep's.

    Classes with short names are imported, so that the word can name them.
    """
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    # Help lists the known subclasses, so all of them must be imported.
    if word in ("-h", "--help") or flag.endswith(".help"):
        _import_all()
    return f"{flag}{equals}{to_lockstep_paths(value)}"


def _import_all() -> None:
    """Import all classes that have a short name, so that ``--help`` can list them."""
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        for name in module.__all__:
            with suppress(ImportError):  # its extra is not installed
                getattr(module, name)


def _with_class(kind: type) -> Callable[[Any], dict[str, Any]]:
    def described(arguments: object) -> dict[str, Any]:
        given = arguments.as_dict() if isinstance(arguments, jsonargparse.Namespace) else arguments
        return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": given or {}}

    return described


def first_line(component: object) -> str | None:
    """Return the first line of a component's docstring, without markup, for ``--help``."""
    try:
        line = docstring_parser.parse(component.__doc__ or "").short_description
    except docstring_parser.ParseError:
        return None
    return None if line is None else re.sub(r"(?::\w+:)?`+([^`]*)`+", r"\1", line)
