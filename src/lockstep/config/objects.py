"""Objects that users give a Trainer (plugins, callbacks, loggers, a profiler), and those that it has by default."""

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
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.callbacks.progress.tqdm import TQDMProgressBar
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
from lockstep.loggers.tensorboard import default_logger
from lockstep.loop.hooks import is_overridden
from lockstep.precision.base import Precision
from lockstep.profilers.base import Profiler


def several(given: object) -> list[Any]:
    """One or several things as a list; None: nothing."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


# -- objects of an installed Lightning -----------------------------------------------------------------------


PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def check_kind(where: str, thing: object, kind: type, name: str) -> None:
    """Refuse what is no instance of ``kind``.

    Args:
        where: the call and its argument, for the message.
        thing: what was given.
        kind: lockstep's class.
        name: how users import it from lockstep.

    Raises:
        WrongType: a class in place of an instance, or something else.
        MisconfigurationException: an object of Lightning's.
    """
    if isinstance(thing, type) and issubclass(thing, kind):
        raise WrongType(f"{where}: {thing.__name__} is a class; give an instance, {thing.__name__}().")
    if isinstance(thing, kind):
        return
    check_not_lightnings(where, thing)
    shown = type(thing).__name__ if not isinstance(thing, type) else f"the class {thing.__name__}"
    raise WrongType(f"{where}: it must be a `{name}` of lockstep, got `{shown}` ({thing!r:.100}).")


def check_not_lightnings(where: str, thing: object) -> None:
    """Refuse an object whose class derives from one of an installed Lightning.

    Raises:
        MisconfigurationException: with the import to change, and the command under which it need not be.
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
        f"{where}: {kind.__name__} derives from {base.__module__}.{base.__qualname__}, and a Trainer of lockstep runs "
        f"classes of lockstep: change its import from `{package}` to `lockstep`; or, where it is a third party's, have "
        f"`{package}` mean lockstep everywhere: {way}."
    )


def check_constructed(where: str, thing: object, attribute: str) -> None:
    """Refuse an object whose class forgot to call the constructor of its base.

    Args:
        where: the call, for the message.
        thing: a module or data module.
        attribute: that the base's ``__init__`` sets.

    Raises:
        MisconfigurationException: with the line to add.
    """
    if attribute not in vars(thing):
        name = type(thing).__name__
        raise MisconfigurationException(
            f"{where}: {name}.__init__ does not call `super().__init__()`; make it its first line."
        )


# -- plugins -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plugins:
    """The plugins of a Trainer, sorted."""

    precision: Precision | None = None
    cluster: DescribesRanks | None = None
    checkpoint_io: CheckpointIO | None = None


def sort_plugins(given: object, precision_flag: str | int | None, carried: Iterable[Any] = ()) -> Plugins:
    """Tell a Trainer's plugins apart.

    Args:
        given: as in ``Trainer(plugins=...)``: None, one, or several.
        precision_flag: as in ``Trainer(precision=...)``, which must not name another precision.
        carried: plugins that were given to the strategy.

    Raises:
        MisconfigurationException: a plugin that lockstep has no place for, or two of one kind.
    """
    named = (environment_named(plugin) if isinstance(plugin, str) else plugin for plugin in carried)
    found: dict[str, Any] = {}
    for plugin in (*several(given), *named):
        kind = _kind(plugin)
        if kind is None:
            raise MisconfigurationException(
                f"Trainer(plugins={plugin!r:.100}): lockstep takes instances of its own Precision and CheckpointIO and "
                "of a ClusterEnvironment here; choose all else by `strategy=` and `precision=`."
            )
        if kind in found:
            raise MisconfigurationException(
                f"Trainer(plugins=[{type(found[kind]).__name__}(), {type(plugin).__name__}()]): there is one {kind}; "
                "give one of them."
            )
        found[kind] = plugin
    if "precision" in found and precision_flag is not None:
        raise MisconfigurationException(
            f"Trainer(precision={precision_flag!r}, plugins={type(found['precision']).__name__}()): both choose the "
            "precision; leave one out."
        )
    if "cluster" in found:
        found["cluster"] = cluster = _cluster(found["cluster"])
        is_given = any(cluster is plugin for plugin in several(given))
        if is_given and isinstance(cluster, SLURMEnvironment) and not cluster.is_in_job():
            del found["cluster"]  # the settings of a job, and this is none: ranks are found as without it
    return Plugins(**found)


def _cluster(given: Any) -> Any:
    """The cluster environment of a run: the given one, where it has its ranks started by somebody else."""
    if given.creates_processes_externally:
        return given
    kinds = [kind.__name__ for kind in type(given).__mro__]
    if "LightningEnvironment" not in kinds:  # that one describes what lockstep does by itself
        raise MisconfigurationException(
            f"Trainer(plugins={type(given).__name__}()): its creates_processes_externally is False, and lockstep "
            'starts ranks by its own means: leave the plugin out and let strategy="ddp" start them, or return True.'
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
    """Refuse what is no callback, and callbacks that a checkpoint could not tell apart; ``where`` is for the message.

    Raises:
        WrongType: one is none.
        MisconfigurationException: two have states, and one key for both.
    """
    for callback in callbacks:
        check_kind(where, callback, Callback, "Callback")
    refuse_one_key([callback for callback in callbacks if isinstance(callback, Callback)], where)


def refuse_one_key(callbacks: Sequence[Callback], where: str) -> None:
    """Refuse callbacks that a checkpoint could not tell apart.

    Args:
        callbacks: of a run.
        where: what named them, for the message.

    Raises:
        MisconfigurationException: two have states, and one key for both.
    """
    stateful = [callback for callback in callbacks if is_overridden("state_dict", callback, Callback)]
    states = {(callback.state_key, callback._shares_state or id(callback)) for callback in stateful}
    keys = Counter(key for key, _ in states)
    key, times = max(keys.items(), key=itemgetter(1), default=("", 0))
    if times > 1:
        raise MisconfigurationException(
            f"{where}: {times} callbacks share the state_key {key!r}, so a checkpoint could keep only one: give their "
            "classes a `state_key` property that tells them apart."
        )


def in_order(callbacks: list[Callback]) -> list[Callback]:
    """Callbacks in their order, but searches before all others, which begin with what was found, and those that write
    checkpoints after all others, whose state they save."""

    def place(callback: Callback) -> int:
        # `is True`: a stand-in of a test (`Mock(spec=Callback)`) has a true value for every name
        return 2 if isinstance(callback, Checkpoint) else int(getattr(callback, "_searches", False) is not True)

    return sorted(callbacks, key=place)


def make_callbacks(
    given: Callback | Sequence[Callback] | None,
    checkpointing: bool | None,
    bar: bool | None,
    summary: bool | None,
    config: RunConfig,
) -> list[Any]:
    """The callbacks of a Trainer, those that write checkpoints last.

    Args:
        given: as in ``Trainer(callbacks=...)``.
        checkpointing: as in ``Trainer(enable_checkpointing=...)``.
        bar: as in ``Trainer(enable_progress_bar=...)``.
        summary: as in ``Trainer(enable_model_summary=...)``.
        config: the RunConfig.

    Raises:
        MisconfigurationException: no callback, two that a checkpoint could not tell apart, a flag and a callback that
            contradict each other.
    """
    callbacks = several(given)
    for callback in callbacks:
        check_kind("Trainer(callbacks=...)", callback, Callback, "Callback")
    refuse_one_key(callbacks, "Trainer(callbacks=...)")
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise MisconfigurationException(
            f"Trainer(callbacks=[{', '.join(bars)}]): two progress bars would draw over each other: keep one."
        )
    defaults: list[tuple[str, bool | None, type[Callback], Callable[[], Callback]]] = [
        ("enable_checkpointing", checkpointing, Checkpoint, ModelCheckpoint),
        ("enable_progress_bar", bar, ProgressBar, choose_progress_bar),
        ("enable_model_summary", summary, ModelSummary, lambda: choose_model_summary(callbacks)),
    ]
    for flag, given_for, kind, make in defaults:
        asked = switch(flag, given_for, optional=True)
        there = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if there and asked is False:
            raise MisconfigurationException(
                f"Trainer({flag}=False, callbacks=[{', '.join(there)}(...)]): leave out the flag or the callback."
            )
        if not there and asked is not False and not (config.fast_dev_run and kind is Checkpoint):
            callbacks.append(make())
    return in_order(callbacks)


def choose_progress_bar() -> ProgressBar:
    """The progress bar of a Trainer whose user named none.

    Returns:
        :class:`RichProgressBar` on a terminal that can move its cursor, if rich is installed;
        :class:`TQDMProgressBar` on other terminals and in notebooks; :class:`PlainProgressBar`, which writes
        a line now and then and never animates, where stdout is a file or a pipe.
    """
    if in_notebook():
        return TQDMProgressBar()
    if not is_terminal(sys.stdout):
        return PlainProgressBar()
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return TQDMProgressBar()
    return TQDMProgressBar() if Console().is_dumb_terminal else RichProgressBar()


# -- loggers -------------------------------------------------------------------------------------------------


def make_loggers(asked: Logger | Iterable[Logger] | bool | None, config: RunConfig) -> list[Any]:
    """The loggers of a Trainer.

    Args:
        asked: True or None for the default one, False for none, a Logger or several.
        config: the RunConfig.

    Raises:
        MisconfigurationException: something that cannot log.
    """
    by_default = asked is None or asked is True
    loggers = [] if by_default or asked is False else several(asked)
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
            check_not_lightnings("Trainer(logger=...)", logger)
            raise MisconfigurationException(
                f"Trainer(logger={asked!r:.100}): give True, False, a Logger such as CSVLogger(folder), or several."
            )
    if config.fast_dev_run and (by_default or loggers):
        return [DummyLogger()]
    return [default_logger(config.default_root_dir)] if by_default else loggers


# -- profiler ------------------------------------------------------------------------------------------------


_PROFILERS = {
    "simple": "base:SimpleProfiler",
    "advanced": "base:AdvancedProfiler",
    "pytorch": "pytorch:PyTorchProfiler",
}


def make_profiler(flag: Profiler | str | None) -> Profiler | None:
    """The profiler of a Trainer; None where nothing is to be recorded.

    Args:
        flag: None, "simple", "advanced", "pytorch" (in any case of letters), or a profiler.

    Raises:
        MisconfigurationException: anything else.
    """
    if flag is None or isinstance(flag, Profiler):
        return flag
    if not isinstance(flag, str) or flag.lower() not in _PROFILERS:
        raise MisconfigurationException(
            f'Trainer(profiler={flag!r}): give None, "simple", "advanced", "pytorch", or a lockstep.profilers.Profiler.'
        )
    file, name = _PROFILERS[flag.lower()].split(":")
    profiler: Profiler = getattr(import_module(f"lockstep.profilers.{file}"), name)()  # late: torch.profiler costs
    return profiler
