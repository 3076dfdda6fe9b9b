"""The table of lockstep's extensions, in which the core finds the names that each extension provides.

An extension is a package in `lockstep.extensions`. The core does not import extensions directly. It looks up a
strategy, a command, a service or a public name here, and the extension is imported then. If an extension is deleted,
its names are missing and everything else works.

Other distributions add strategies and commands by entry points of the groups ``lockstep.strategies`` and
``lockstep.commands``. They cannot override a name that lockstep has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ROOT = "lockstep.extensions"
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "extensions")

Group = Literal["strategies", "commands", "services"]
KIND = {"strategies": "strategy", "commands": "command", "services": "service"}


class Extension(NamedTuple):
    """Table entry of one extension: the names that it provides, and the place from which each is imported.

    A place is ``"module"`` or ``"module:name"``, relative to the extension's folder.
    """

    strategies: Mapping[str, tuple[str, Mapping[str, Any]]] = {}
    """From the name in ``Trainer(strategy=...)`` to the place of the class, and its arguments."""
    commands: Mapping[str, tuple[str, str]] = {}
    """From the command after ``lockstep`` to the place of its function, and one line of help. The function takes the
    arguments and returns an exit code."""
    services: Mapping[str, str] = {}
    """From the name of a service that the core uses to its place."""
    names: Mapping[str, str] = {}
    """From a public name, such as ``"callbacks.Timer"``, to the module that defines it."""
    paths: Mapping[str, str] = {}
    """From a path below lockstep to the module that it, and all paths below it, redirect to; "" for the folder."""


_OFFLOAD = {"offload_optimizer": True, "offload_parameters": True}
_NVME = {"offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
_DEEPSPEED: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed_stage_1": {"stage": 1},
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {"stage": 3} | _OFFLOAD,
    "deepspeed_stage_3_offload_nvme": {"stage": 3} | _OFFLOAD | _NVME,
}

EXTENSIONS: dict[str, Extension] = {
    "balancing": Extension(
        strategies={"balanced": ("pipeline.strategy:BalancedStrategy", {})},
        commands={"plan": ("plan_command:plan", "show memory and time of each way to train a script's model")},
        services={
            "balance": "balance.balance",
            "plan of an automatic choice": "plans.choice:reconsider",
            "prediction of a plan": "plans.prediction:PredictionCheck",
            "saved plans": "planned",
            "trainer.plan": "plans.choice:plan_fit",
        },
        names={
            "callbacks.StageTimeline": "stage_timeline",
            "callbacks.StragglerMonitor": "straggler_monitor",
            "strategies.BalancedStrategy": "pipeline.strategy",
        },
        paths={
            "balance": "balance",
            "callbacks.stage_timeline": "stage_timeline",
            "callbacks.straggler_monitor": "straggler_monitor",
            "cli.plan": "plan_command",
            "data.shares": "shares",
            "engines.pipeline": "pipeline",
            "engines.planned": "planned",
            "ground.window_times": "balance.step_times",
            "planner": "planner",
            "plans": "plans",
        },
    ),
    "deepspeed": Extension(
        strategies={name: ("strategy:DeepSpeedStrategy", arguments) for name, arguments in _DEEPSPEED.items()},
        services={"folders of DeepSpeed's engine": "folder"},
        names={"strategies.DeepSpeedStrategy": "strategy"},
        paths={"engines.deepspeed": ""},
    ),
    "extras": Extension(
        names={
            "callbacks.BatchSizeFinder": "tuner.batch_size",
            "callbacks.EMAWeightAveraging": "weight_averaging",
            "callbacks.LearningRateFinder": "tuner.lr_finder",
            "callbacks.ModelPruning": "pruning",
            "callbacks.SpikeDetection": "spike",
            "callbacks.StochasticWeightAveraging": "stochastic_weight_avg",
            "callbacks.ThroughputMonitor": "throughput_monitor",
            "callbacks.TrainingSpikeException": "spike",
            "callbacks.WeightAveraging": "weight_averaging",
            "tuner.Tuner": "tuner.tuning",
        },
        paths={
            "callbacks.pruning": "pruning",
            "callbacks.spike": "spike",
            "callbacks.stochastic_weight_avg": "stochastic_weight_avg",
            "callbacks.throughput_monitor": "throughput_monitor",
            "callbacks.weight_averaging": "weight_averaging",
            "ground.throughput": "throughput",
            "tuner.batch_size": "tuner.batch_size",
            "tuner.lr_finder": "tuner.lr_finder",
            "tuner.trial": "tuner.trial",
            "tuner.tuning": "tuner.tuning",
        },
    ),
    "lightning": Extension(
        commands={
            "migrate": (
                "migrate:migrate",
                "show what a script for Lightning needs: imports and flags as a diff, the rest by line",
            ),
        },
        services={"Lightning's names": "unchanged"},
        names={
            "cli.ArgsType": "parser",
            "cli.LRSchedulerCallable": "parser",
            "cli.LRSchedulerType": "parser",
            "cli.LRSchedulerTypeTuple": "parser",
            "cli.LRSchedulerTypeUnion": "parser",
            "cli.LightningArgumentParser": "parser",
            "cli.LightningCLI": "command_line",
            "cli.OptimizerCallable": "parser",
            "cli.ReduceLROnPlateau": "parser",
            "cli.SaveConfigCallback": "command_line",
            "cli.instantiate_class": "command_line",
            "cli.instantiate_module": "command_line",
        },
        paths={
            "cli.lightning": "command_line",
            "cli.migrate": "migrate",
            "cli.parser": "parser",
            "lightning": "unchanged",
        },
    ),
    "parallel": Extension(
        strategies={"dp": ("dp.strategy:DataParallelStrategy", {})},
        services={"communication hooks": "comm_hooks:communication_hook"},
        names={
            "DataParallel": "dp.replicas",
            "DistributedDataParallel": "container",
        },
        paths={
            "engines.ddp.averaging": "averaging",
            "engines.ddp.backward_watcher": "backward_watcher",
            "engines.ddp.comm_hooks": "comm_hooks",
            "engines.ddp.container": "container",
            "engines.ddp.hooks": "hooks",
            "engines.ddp.join": "join",
            "engines.ddp.torch_names": "torch_names",
            "engines.dp": "dp",
            "parallel.averaging": "averaging",
            "parallel.ddp": "container",
            "parallel.hooks": "hooks",
        },
    ),
    "replay": Extension(
        commands={
            "bisect": ("bisect_command:bisect", "find the step and the operation in which two versions of a run part"),
            "replay": ("command:replay", "make a step of a run again, and show which samples caused what it did"),
        },
        services={"recording of steps": "recording:recording"},
    ),
    "search": Extension(
        commands={
            "submit": ("submit_command:submit", "submit a script to SLURM"),
            "trials": (
                "trials_command:trials",
                "show, resubmit or cancel the trials of a search on SLURM",
            ),
        },
        services={"trial": "trials:TrialFolder"},
        names={
            "HyperOptArgumentParser": "parser",
            "SlurmCluster": "cluster",
            "callbacks.PruneTrial": "prune_trial",
        },
        paths={
            "callbacks.prune_trial": "prune_trial",
            "cli.submit": "submit_command",
            "cli.trials": "trials_command",
            "hpc": "",
        },
    ),
    "verify": Extension(
        commands={
            "verify": ("command:verify", "check that a script trains on N ranks what it trains as one process"),
        },
        services={"pytest's fixture verified": "fixture:verified", "trainer.verify": "fitted:verify_fit"},
        paths={"cli.verify": "command", "verify": ""},
    ),
}
"""Lockstep's own extensions, by folder name."""


class MissingExtension(MisconfigurationException, ImportError):
    """Error for a name from an extension that is not installed or cannot be imported."""


# -- what is there -------------------------------------------------------------------------------------------


def is_there(extension: str) -> bool:
    """Return True if the folder of an extension exists, which means that the extension is installed."""
    return os.path.isfile(os.path.join(FOLDER, extension, "__init__.py"))


def available() -> dict[str, Extension]:
    """Return the table's entries for all installed extensions, by extension name."""
    return {name: rows for name, rows in EXTENSIONS.items() if is_there(name)}


def names_of(face: str) -> dict[str, str]:
    """Return the names that extensions add to the public module ``face``, each with the path of its defining module.

    Args:
        face: path of the public module below lockstep, such as ``"callbacks"``; "" for lockstep itself.
    """
    found = {}
    for extension, rows in available().items():
        for name, module in rows.names.items():
            where, _, last = name.rpartition(".")
            if where == face:
                found[last] = f"{ROOT}.{extension}.{module}"
    return found


def module_of(path: str) -> str | None:
    """Return the extension module to which an import path below lockstep is redirected; None if it is not redirected.

    Example:
        >>> module_of("verify.certificate")
        'lockstep.extensions.verify.certificate'
    """
    before, below = path, ""
    while before:
        for extension, rows in EXTENSIONS.items():
            if before in rows.paths:
                parts = (ROOT, extension, rows.paths[before], below)
                return ".".join(part for part in parts if part)
        before, _, last = before.rpartition(".")
        below = f"{last}.{below}".rstrip(".")
    return None


def absent(name: str) -> str | None:
    """Return an error message if a name or path below lockstep belongs to an extension that is not installed.

    Return None otherwise.
    """
    for extension, rows in EXTENSIONS.items():
        under = any(name == path or name.startswith(f"{path}.") for path in rows.paths)
        if (name in rows.names or under) and not is_there(extension):
            return _absent(f"lockstep.{name}", extension)
    return None


def _absent(what: str, extension: str) -> str:
    return (
        f"{what} belongs to the extension {extension!r}, but {ROOT}.{extension} is not installed: reinstall "
        "torch-lockstep, or do not use it."
    )


# -- imported on demand --------------------------------------------------------------------------------------


def strategies() -> dict[str, Mapping[str, Any]]:
    """Return {strategy name: arguments} for the strategies of all extensions, even of those that are not installed."""
    return {name: row[1] for rows in EXTENSIONS.values() for name, row in rows.strategies.items()}


def commands() -> dict[str, str]:
    """Return the commands that extensions and other distributions provide, each with one line of help."""
    found = {name: row[1] for rows in available().values() for name, row in rows.commands.items()}
    for name, points in _others("commands").items():
        found.setdefault(name, f"a command of {' and of '.join(map(_origin, points))}")
    return found


def load(group: Group, name: str) -> Any:
    """Import and return the object that an extension, or another distribution, has registered under a name.

    Args:
        group: kind of the object.
        name: name in the table, or of an entry point.

    Raises:
        MissingExtension: its extension does not exist or cannot be imported, or two distributions claim the name.
        KeyError: the name is unknown.
    """
    what = f"the {KIND[group]} {name!r}"
    for extension, rows in EXTENSIONS.items():
        row = getattr(rows, group).get(name)
        if row is not None:
            if not is_there(extension):
                raise MissingExtension(_absent(what, extension))
            return _at(extension, row if isinstance(row, str) else row[0])
    points = _others(group)[name]
    if len(points) > 1:
        raise MissingExtension(
            f"{what} is provided by {' and by '.join(sorted(map(_origin, points)))}: uninstall one of them."
        )
    try:
        return points[0].load()
    except Exception as error:
        raise MissingExtension(
            f"{what} of {_origin(points[0])} cannot be imported from {points[0].value!r}: {type(error).__name__}: "
            f"{error}. Repair or uninstall that package."
        ) from error


def is_known(group: Group, name: str) -> bool:
    """Return True if an extension of lockstep or an entry point of another distribution provides a name."""
    return any(name in getattr(rows, group) for rows in EXTENSIONS.values()) or name in _others(group)


def _at(extension: str, place: str) -> Any:
    module, _, name = place.partition(":")
    found = import_module(f"{ROOT}.{extension}.{module}")
    return getattr(found, name) if name else found


@functools.cache
def _others(group: Group) -> dict[str, list[EntryPoint]]:
    """Return the entry points in a group that other installed distributions define, by name."""
    # Takes 10 ms, so it is imported only for names that lockstep lacks.
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"lockstep.{group}"):
        same = found.setdefault(point.name, [])
        if all((point.value, _origin(point)) != (other.value, _origin(other)) for other in same):
            same.append(point)
    return found


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
