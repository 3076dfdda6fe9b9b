"""Hyperparameters, which are the arguments of a module's ``__init__`` that a checkpoint stores."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import LIGHTNING
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.tree import NotPlain, classes_in, described, plain

given_hyperparameters: ContextVar[dict[str, Any] | None] = ContextVar("given_hyperparameters", default=None)
"""Arguments of ``__init__`` as parsed from a command line, which are saved instead of the objects built from them."""


class AttributeDict(dict[str, Any]):
    """A dict whose items can be read, set and deleted as attributes too.

    Example::

        >>> settings = AttributeDict(lr=0.1)
        >>> settings.lr
        0.1
        >>> settings.depth = 3
        >>> settings["depth"]
        3
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r}") from None

    def __setattr__(self, key: str, value: object) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        try:
            del self[key]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r}") from None

    def __repr__(self) -> str:
        width = max((len(str(key)) for key in self), default=0) + 3
        labels = {key: f'"{key}":' for key in sorted(self, key=str)}
        return "\n".join(f"{label:{width}} {self[key]}" for key, label in labels.items())


class HyperparametersMixin:
    """Mixin class with the method :meth:`save_hyperparameters`, and its results as attributes."""

    #: True if the Trainer sends these hyperparameters to its loggers
    _log_hyperparams: bool = False
    #: the argument of ``__init__`` that takes all hyperparameters at once; "kwargs": each has its own argument
    _hparams_name: str | None = None
    _hparams: MutableMapping[str, Any]

    __jit_unused_properties__: list[str] = ["hparams", "hparams_initial"]

    def save_hyperparameters(
        self,
        *args: object,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save arguments of ``__init__`` in :attr:`hparams`. Call this method inside ``__init__``.

        :attr:`hparams` keeps the objects. A checkpoint contains no code: it holds their plain form (a path as a
        string, an ``Enum`` as its value, a ``Namespace`` or dataclass as a dict) and the names of their classes.
        ``load_from_checkpoint`` rebuilds a path, ``Namespace`` or frozen set always, and an object of your own class if
        the argument's annotation names that class or a base of it. Otherwise it passes the plain form and warns. A
        module is omitted, since the checkpoint has its weights.

        If a base class calls this, it also collects the arguments of the subclasses' ``__init__``; for equal names the
        outermost call wins. Several calls add up.

        Args:
            args: names of arguments, or one dict or Namespace with all values; default: all arguments.
            ignore: names to omit; values that a base class has saved under them are dropped.
            frame: the frame of ``__init__``, if it is not the caller's.
            logger: send the hyperparameters to the Trainer's loggers.

        Raises:
            MisconfigurationException: a name is not an argument of ``__init__``, there are several containers, or a
                checkpoint cannot hold one of the values (a function, a class, an object of your own). If a base class
                calls this, the last error is raised when the checkpoint is made: a subclass may still ignore the
                argument.

        Example::

            class Net(LightningModule):
                def __init__(self, width, lr=1e-3, loss=None):
                    super().__init__()
                    self.save_hyperparameters(ignore="loss")     # self.hparams.width, self.hparams.lr
        """
        self._log_hyperparams = logger
        if len(args) == 1 and not isinstance(args[0], str) and not args[0]:
            return
        if frame is None:
            current = inspect.currentframe()
            assert current is not None
            frame = current.f_back
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        arguments, calls = _init_arguments(self, frame)
        parsed = given_hyperparameters.get()
        arguments = arguments if parsed is None else parsed
        chosen, self._hparams_name = _choose(args, {k: value for k, value in arguments.items() if k not in ignored})
        self._set_hparams(chosen)
        self.remove_ignored_hparams(list(ignored))
        # Not for a call in a base class: a subclass may still ignore the argument.
        if calls < 2:
            plain_hyperparameters(self.hparams)
        for name, value in self.hparams.items():
            if isinstance(value, nn.Module) and not LIGHTNING.is_installed:
                rank_zero_warn(
                    f"The hyperparameter {name!r} is a module and is not saved, since a checkpoint already has its "
                    f"weights: pass it to `load_from_checkpoint(path, {name}=...)`. Silence this by "
                    f"`self.save_hyperparameters(ignore=[{name!r}])`."
                )
        self._hparams_initial = copy.deepcopy(self.hparams)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove the hyperparameters with these names, for example those that a base class has saved.

        Args:
            ignore_list: names of hyperparameters; unknown names are ignored.
        """
        for name in ignore_list:
            self.hparams.pop(name, None)

    def _set_hparams(self, hparams: object) -> None:
        if isinstance(hparams, Namespace):
            hparams = vars(hparams)
        if not isinstance(hparams, MutableMapping):
            raise MisconfigurationException(
                f"save_hyperparameters() received a {type(hparams).__name__}, which is not supported: pass names of "
                "arguments, or one dict or Namespace."
            )
        if isinstance(hparams, dict) and isinstance(self.hparams, dict):
            self.hparams.update(hparams)
        else:
            self._hparams = hparams

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters in an :class:`AttributeDict`, which the user may change."""
        if "_hparams" not in self.__dict__:
            self._hparams = AttributeDict()
        return self._hparams  # type: ignore[return-value]  # or the mapping passed to save_hyperparameters

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were last saved."""
        # A copy, so that changes do not affect the values that were logged.
        found: AttributeDict = copy.deepcopy(self.__dict__.get("_hparams_initial", AttributeDict()))
        return found


def _choose(args: tuple[Any, ...], found: dict[str, Any]) -> tuple[Any, str | None]:
    """Return (hyperparameters that ``save_hyperparameters(*args)`` saves, value of ``_hparams_name``).

    The function selects from `found`, which has the arguments of ``__init__``.
    """
    if not args:
        return found, "kwargs" if found else None
    containers = [arg for arg in args if not isinstance(arg, str)]
    if len(containers) == 1:
        return containers[0], next((n for n, value in found.items() if is_same(value, containers[0])), None)
    if containers:
        raise MisconfigurationException(
            f"save_hyperparameters() received {len(containers)} dicts or other containers: pass names of arguments, or "
            "one dict or Namespace."
        )
    unknown = [name for name in args if name not in found]
    if unknown:
        raise MisconfigurationException(
            f"save_hyperparameters({', '.join(map(repr, args))}): {unknown[0]!r} is not an argument of __init__, or "
            f"`ignore` contains it: choose from {sorted(found)}."
        )
    return {name: found[name] for name in args}, "kwargs"


def is_same(value: object, container: object) -> bool:
    """Return True if two objects have the same class and are equal. Return False if they cannot be compared."""
    if value is container:
        return True
    try:
        return type(value) is type(container) and bool(value == container)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays inside have no single truth value
        return False


def plain_hyperparameters(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Convert hyperparameters to plain values, which a checkpoint can store. Omit modules.

    With Lightning's names (`lockstep.lightning`), modules and values without a plain form stay, as in Lightning.

    Raises:
        MisconfigurationException: a value has no plain form; the message names the key.
    """
    kept = {}
    for name, value in hparams.items():
        if isinstance(value, nn.Module) and not LIGHTNING.is_installed:
            continue
        try:
            kept[name] = plain(value)
        except NotPlain as error:
            if LIGHTNING.is_installed:
                kept[name] = value
                continue
            inside = "".join(f"[{key!r}]" for key in error.keys)
            what = f"contains, at {inside}, {described(error.value)}" if inside else f"is {described(error.value)}"
            raise MisconfigurationException(
                f"save_hyperparameters(): the hyperparameter {name!r} {what}, which cannot be saved, because "
                f"checkpoints contain no code. Omit it with save_hyperparameters(ignore=[{name!r}]) and pass it to "
                f"load_from_checkpoint(path, {name}=...); or use a string, such as its name, instead."
            ) from error
    return kept


def noted_classes(hparams: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[tuple[Any, ...], str]:
    """Return the classes that a checkpoint must store to rebuild hyperparameters from their plain values.

    Args:
        hparams: the objects.
        kept: the plain forms of the objects. A value that is its own plain form gets no entry.
    """
    changed = [name for name, form in kept.items() if form is not hparams[name]]
    return dict(each for name in changed for each in classes_in(hparams[name], (name,)))


def merged_hyperparameters(sources: Iterable[Any]) -> dict[str, Any]:
    """Merge the hyperparameters of a module and a data module for the loggers.

    Raises:
        MisconfigurationException: both have a hyperparameter of the same name with different values.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        if not getattr(source, "_log_hyperparams", False):
            continue
        for name, value in source.hparams_initial.items():
            if name in merged and not is_same(merged[name], value):
                raise MisconfigurationException(
                    f"The hyperparameter {name!r} is {merged[name]!r:.100} in the module and {value!r:.100} in the "
                    "data module, so it is unclear which to log: rename one, or call "
                    "save_hyperparameters(logger=False) in one of the two."
                )
            if name not in ("_class_path", "_instantiator"):  # notes of the command line
                merged[name] = value
    return merged


def _init_arguments(obj: object, frame: FrameType | None) -> tuple[dict[str, Any], int]:
    """Return (arguments of all running calls of ``__init__`` on `obj` as one dict, number of these calls)."""
    if dataclasses.is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}, 1
    found: dict[str, Any] = {}
    calls = 0
    while frame is not None:
        arguments = arguments_of_init(obj, frame)
        if arguments is not None:
            calls += 1
            found.update(arguments)  # an outer call belongs to a subclass: its names win
        elif calls:
            break
        frame = frame.f_back
    return found, calls


def arguments_of_init(obj: object, frame: FrameType) -> dict[str, Any] | None:
    """Return the arguments with which `frame` runs ``__init__`` of `obj`, or None if `frame` runs another call."""
    code = frame.f_code
    if code.co_name != "__init__" or code.co_argcount == 0:
        return None
    names, _, keywords, values = inspect.getargvalues(frame)
    if values.get(names[0]) is not obj:
        return None
    arguments = {name: values[name] for name in names[1:] if name in values}
    if keywords is not None:
        arguments.update(values.get(keywords, {}))
    return arguments
