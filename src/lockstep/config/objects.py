"""Checks of the plugins, callbacks, loggers and profiler for a Trainer, and their defaults."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import itemgetter
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
from lockstep.callbacks.model_summary import ModelSummary, choose_model_summary
from lockstep.callbacks.progress.base import PlainProgressBar, ProgressBar, in_notebook, is_terminal
from lockstep.checkpoint.io import CheckpointIO
from lockstep.cluster.environments import (
    DescribesRanks,
    LightningEnvironment,
    SLURMEnvironment,
    describes_ranks,
    environment_named,
)
from lockstep.config.run import RunConfig, switch
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.loggers.base import DummyLogger, Logger
from lockstep.loop.hooks import is_overridden
from lockstep.precision.base import Precision
from lockstep.profilers.base import Profiler


def several(given: object) -> list[Any]:
    """Convert None, one object, or several objects to a list of objects."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


# -- objects of an installed Lightning -----------------------------------------------------------------------


PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def check_kind(where: str, thing: object, kind: type, name: str) -> None:
    """Raise an error if an object is not an instance of ``kind``.

    Args:
        where: the call and its argument, for the message.
        thing: the object.
        kind: the required class of lockstep.
        name: name of the class, for the message.

    Raises:
        WrongType: the object is a class, or an instance of another class.
        MisconfigurationException: the object is from an installed Lightning.
    """
    if isinstance(thing, type) and issubclass(thing, kind):
        raise WrongType(f"{where}: {thing.__name__} is a class: pass an instance, {thing.__name__}().")
    if isinstance(thing, kind):
        return
    check_not_lightnings(where, thing)
    shown = type(thing).__name__ if not isinstance(thing, type) else f"the class {thing.__name__}"
    raise WrongType(f"{where}: pass an instance of lockstep's `{name}`, not of `{shown}` ({thing!r:.100}).")


def check_not_lightnings(where: str, thing: object) -> None:
    """Raise an error if the class of an object derives from a class of Lightning, not of lockstep.

    Raises:
        MisconfigurationException: the class does. The message has the import to change, or an alternative command.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    base = next((base for base in kind.__mro__ if base.__module__.split(".")[0] in PACKAGES), None)
    if base is None:
        return
    root = base.__module__.split(".")[0]
    package = "lightning.pytorch" if root == "lightning" else root
    if in_notebook():
        way = "`%load_ext lockstep.lightning` in the first cell of a new kernel"
    else:
        script = os.path.basename(sys.argv[0])
        way = f"`lockstep run --lightning {script if script.endswith('.py') else 'script.py'}`"
    raise MisconfigurationException(
        f"{where}: {kind.__name__} derives from {base.__module__}.{base.__qualname__}, but lockstep's Trainer needs "
        f"lockstep's class: import it from `lockstep` instead of `{package}`. If {kind.__name__} is not your code, "
        f"replace `{package}` by lockstep everywhere with {way}."
    )


def check_constructed(where: str, thing: object, attribute: str) -> None:
    """Raise an error if the constructor of an object did not call ``super().__init__()``.

    Args:
        where: the call, for the message.
        thing: a module or data module.
        attribute: an attribute that the base class sets in ``__init__``.

    Raises:
        MisconfigurationException: ``attribute`` is missing. The message has the line to add.
    """
    if attribute not in vars(thing):
        name = type(thing).__name__
        raise MisconfigurationException(
            f"{where}: {name}.__init__ did not call `super().__init__()`: add that as its first line."
        )


# -- plugins -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plugins:
    """The plugins of a Trainer: at most one of each kind."""

    precision: Precision | None = None
    cluster: DescribesRanks | None = None
    checkpoint_io: CheckpointIO | None = None


def sort_plugins(given: object, precision_flag: str | int | None, carried: Iterable[Any] = ()) -> Plugins:
    """Validate the plugins of a Trainer, and return them by kind.

    Args:
        given: value of ``Trainer(plugins=...)``: None, one, or several.
        precision_flag: value of ``Trainer(precision=...)``, which excludes a precision plugin.
        carried: plugins that were passed to the strategy.

    Raises:
        MisconfigurationException: a plugin is of an unsupported kind, or there are two of one kind.
    """
    named = (environment_named(plugin) if isinstance(plugin, str) else plugin for plugin in carried)
    found: dict[str, Any] = {}
    for plugin in (*several(given), *named):
        kind = _kind(plugin)
        if kind is None:
            raise MisconfigurationException(
                f"Trainer(plugins={plugin!r:.100}) is not supported: pass instances of lockstep's Precision or "
                "CheckpointIO, or a ClusterEnvironment; select everything else with `strategy=` and `precision=`."
            )
        if kind in found:
            raise MisconfigurationException(
                f"Trainer(plugins=[{type(found[kind]).__name__}(), {type(plugin).__name__}()]): a run can have only "
                f"one {kind}: remove one of them."
            )
        found[kind] = plugin
    if "precision" in found and precision_flag is not None:
        raise MisconfigurationException(
            f"Trainer(precision={precision_flag!r}, plugins={type(found['precision']).__name__}()): both select the "
            "precision: remove one of them."
        )
    if "cluster" in found:
        found["cluster"] = cluster = _cluster(found["cluster"])
        is_given = any(cluster is plugin for plugin in several(given))
        if is_given and isinstance(cluster, SLURMEnvironment) and not cluster.is_in_job():
            del found["cluster"]  # its settings are for a job, and this process is not in one
    return Plugins(**found)


def _cluster(given: Any) -> Any:
    """Validate a cluster environment that was passed as a plugin, and return it.

    In place of a `LightningEnvironment`, which may be Lightning's own, return lockstep's.
    """
    if given.creates_processes_externally:
        return given
    # LightningEnvironment describes how lockstep starts ranks itself; by name, since it may be Lightning's own class.
    if "LightningEnvironment" not in [kind.__name__ for kind in type(given).__mro__]:
        raise MisconfigurationException(
            f"Trainer(plugins={type(given).__name__}()): its creates_processes_externally is False, but without a "
            'cluster lockstep starts the ranks itself: remove the plugin and use strategy="ddp", or return True.'
        )
    return LightningEnvironment()


def _kind(plugin: object) -> str | None:
    if isinstance(plugin, Precision):
        return "precision"
    if isinstance(plugin, CheckpointIO):
        return "checkpoint_io"
    return "cluster" if describes_ranks(plugin) else None


# -- callbacks -----------------------------------------------------------------------------------------------


def check_callbacks(where: str, callbacks: Sequence[object]) -> None:
    """Raise an error if an object is not a callback, or if two callbacks would save states under one key.

    Args:
        where: the call and its argument, for the message.
        callbacks: the objects.

    Raises:
        WrongType: an object is not a callback.
        MisconfigurationException: two callbacks with states have the same key.
    """
    for callback in callbacks:
        check_kind(where, callback, Callback, "Callback")
    refuse_one_key([callback for callback in callbacks if isinstance(callback, Callback)], where)


def refuse_one_key(callbacks: Sequence[Callback], where: str) -> None:
    """Raise an error if two callbacks that have states share a ``state_key``; a checkpoint stores one state per key.

    Args:
        callbacks: callbacks of a run.
        where: the call and its argument, for the message.

    Raises:
        MisconfigurationException: two callbacks with states have the same key.
    """
    stateful = [callback for callback in callbacks if is_overridden("state_dict", callback, Callback)]
    # Callbacks that share one state on purpose count once.
    states = {(callback.state_key, callback._shares_state or id(callback)) for callback in stateful}
    keys = Counter(key for key, _ in states)
    key, times = max(keys.items(), key=itemgetter(1), default=("", 0))
    if times > 1:
        raise MisconfigurationException(
            f"{where}: {times} callbacks have the same state_key, {key!r}, so a checkpoint could store only one of "
            "their states: define a property `state_key` in their classes that differs between them."
        )


def in_order(callbacks: list[Callback]) -> list[Callback]:
    """Sort callbacks: first those that search for a setting, then all others, last those that write checkpoints."""
    # The others start with the results of a search. A checkpoint holds their states after the hook.

    def place(callback: Callback) -> int:
        # `is True`: a mock (`Mock(spec=Callback)`) has a true value for every name
        return 2 if isinstance(callback, Checkpoint) else int(getattr(callback, "_searches", False) is not True)

    return sorted(callbacks, key=place)


def make_callbacks(
    given: Callback | Sequence[Callback] | None,
    checkpointing: bool | None,
    bar: bool | None,
    summary: bool | None,
    config: RunConfig,
) -> list[Any]:
    """Validate a Trainer's callbacks, add the default callbacks, and return them in the order of their calls.

    Args:
        given: value of ``Trainer(callbacks=...)``.
        checkpointing: value of ``Trainer(enable_checkpointing=...)``.
        bar: value of ``Trainer(enable_progress_bar=...)``.
        summary: value of ``Trainer(enable_model_summary=...)``.
        config: the config of the run.

    Raises:
        MisconfigurationException: an object is not a callback, two callbacks have the same key, or a flag contradicts
            a callback.
    """
    callbacks = several(given)
    for callback in callbacks:
        check_kind("Trainer(callbacks=...)", callback, Callback, "Callback")
    refuse_one_key(callbacks, "Trainer(callbacks=...)")
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise MisconfigurationException(
            f"Trainer(callbacks=[{', '.join(bars)}]) has {len(bars)} progress bars, which would draw over each other: "
            "keep only one."
        )
    defaults: list[tuple[str, bool | None, type[Callback], Callable[[], Callback]]] = [
        ("enable_checkpointing", checkpointing, Checkpoint, ModelCheckpoint),
        ("enable_progress_bar", bar, ProgressBar, choose_progress_bar),
        ("enable_model_summary", summary, ModelSummary, lambda: choose_model_summary(callbacks)),
    ]
    for flag, given_for, kind, make in defaults:
        is_on = switch(flag, given_for, optional=True)
        existing = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if existing and is_on is False:
            raise MisconfigurationException(
                f"Trainer({flag}=False, callbacks=[{', '.join(existing)}(...)]): the flag contradicts the callback: "
                "remove one."
            )
        if not existing and is_on is not False and not (config.fast_dev_run and kind is Checkpoint):
            callbacks.append(make())
    return in_order(callbacks)


def choose_progress_bar() -> ProgressBar:
    """Return the default progress bar for this terminal and for the installed packages.

    Returns:
        ``RichProgressBar`` on a terminal that can move its cursor, if rich is installed;
        ``TQDMProgressBar`` on other terminals and in notebooks; :class:`PlainProgressBar`, which prints
        a line now and then and never animates, if stdout is a file or a pipe.
    """
    if not in_notebook() and not is_terminal(sys.stdout):
        return PlainProgressBar()
    # each run loads the bar that it shows
    from lockstep.callbacks.progress.tqdm import TQDMProgressBar

    if in_notebook():
        return TQDMProgressBar()
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return TQDMProgressBar()
    if Console().is_dumb_terminal:
        return TQDMProgressBar()
    from lockstep.callbacks.progress.rich import RichProgressBar

    return RichProgressBar()


# -- loggers -------------------------------------------------------------------------------------------------


def make_loggers(given: Logger | Iterable[Logger] | bool | None, config: RunConfig) -> list[Any]:
    """Validate ``Trainer(logger=...)`` and return a list of loggers.

    Args:
        given: True or None for the default one, False for none, a Logger or several.
        config: the config of the run.

    Raises:
        MisconfigurationException: an object is not a logger.
    """
    by_default = given is None or given is True
    loggers = [] if by_default or given is False else several(given)
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
            check_not_lightnings("Trainer(logger=...)", logger)
            raise MisconfigurationException(
                f"Trainer(logger={given!r:.100}) is not valid: pass True, False, a Logger such as CSVLogger(folder), "
                "or a list of loggers."
            )
    # A trial run of a few batches must not leave files.
    if config.fast_dev_run and (by_default or loggers):
        return [DummyLogger()]
    if not by_default:
        return loggers
    from lockstep.loggers.tensorboard import default_logger  # a logger of the user's may need no other

    return [default_logger(config.default_root_dir)]


# -- profiler ------------------------------------------------------------------------------------------------


_PROFILERS = {
    "simple": "base:SimpleProfiler",
    "advanced": "base:AdvancedProfiler",
    "pytorch": "pytorch:PyTorchProfiler",
}


def make_profiler(flag: Profiler | str | None) -> Profiler | None:
    """Validate ``Trainer(profiler=...)`` and return the profiler. Return None without one.

    Args:
        flag: None, "simple", "advanced", "pytorch" (upper or lower case), or a profiler.

    Raises:
        MisconfigurationException: the value is anything else.
    """
    if flag is None or isinstance(flag, Profiler):
        return flag
    if not isinstance(flag, str) or flag.lower() not in _PROFILERS:
        raise MisconfigurationException(
            f'Trainer(profiler={flag!r}) is not valid: pass None, "simple", "advanced", "pytorch", or an instance of '
            "lockstep.profilers.Profiler."
        )
    file, name = _PROFILERS[flag.lower()].split(":")
    # imported here, since torch.profiler is slow to import
    profiler: Profiler = getattr(import_module(f"lockstep.profilers.{file}"), name)()
    return profiler
