"""Names of strategies for ``Trainer(strategy="...")``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lockstep.engines.strategy import SingleDeviceStrategy, Strategy
from lockstep.ground import extensions
from lockstep.ground.errors import MisconfigurationException

SPAWN, FORK = {"start_method": "spawn"}, {"start_method": "fork"}
DDP, FSDP = "ddp.strategy.DDPStrategy", "sharded.fsdp.FSDPStrategy"
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "single_device": ("strategy.SingleDeviceStrategy", {}),
    "ddp": (DDP, {}),
    "ddp_find_unused_parameters_true": (DDP, {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": (DDP, {"find_unused_parameters": False}),
    "ddp_spawn": (DDP, SPAWN),
    "ddp_spawn_find_unused_parameters_true": (DDP, SPAWN | {"find_unused_parameters": True}),
    "ddp_spawn_find_unused_parameters_false": (DDP, SPAWN | {"find_unused_parameters": False}),
    "ddp_fork": (DDP, FORK),
    "ddp_fork_find_unused_parameters_true": (DDP, FORK | {"find_unused_parameters": True}),
    "ddp_fork_find_unused_parameters_false": (DDP, FORK | {"find_unused_parameters": False}),
    # In Lightning these fork. A notebook's kernel has threads, and mostly has used the GPU in an earlier cell; fresh
    # processes work all the same, and modules from cells travel by value.
    "ddp_notebook": (DDP, SPAWN),
    "ddp_notebook_find_unused_parameters_true": (DDP, SPAWN | {"find_unused_parameters": True}),
    "ddp_notebook_find_unused_parameters_false": (DDP, SPAWN | {"find_unused_parameters": False}),
    "fsdp": (FSDP, {}),
    "fsdp_cpu_offload": (FSDP, {"cpu_offload": True}),
    "model_parallel": ("sharded.model_parallel.ModelParallelStrategy", {}),
}
"""Name -> (file and class below `lockstep.engines`, arguments). `lockstep.ground.extensions` adds further names."""

WITHOUT_NOTEBOOK_NAME = ("fsdp", "fsdp_cpu_offload", "model_parallel", "balanced")
"""Names of strategies that spawn ranks if there is no script to start; "ddp" has "ddp_notebook" for that."""

_XLA = 'it needs torch_xla; torch_tpu makes TPUs devices of torch: use accelerator="tpu", strategy="auto"'
_SLICED = (
    "Lightning has dropped it, too; use DDPStrategy(shard_optimizer=True), which divides optimizers' work and states"
)
_GONE = 'Lightning has dropped it, too; use "ddp"'
REFUSED = {
    "ddp2": 'it was dp within each node and ddp between them, and Lightning has dropped it; use "ddp"',
    "xla": _XLA,
    "xla_debug": _XLA,
    "single_xla": _XLA,
    "single_tpu": _XLA,
    "tpu_spawn": _XLA,
    "ddp_cpu": 'use accelerator="cpu", devices=2, strategy="ddp"',
    "ddp_sharded": _SLICED,
    "ddp_sharded_spawn": _SLICED,
    "ddp_fully_sharded": _GONE,
    "horovod": _GONE,
    "bagua": _GONE,
    "colossalai": _GONE,
    "hivemind": _GONE,
}
"""Names of Lightning's other strategies, also of earlier versions -> the reason, and what to use instead."""


def is_plan(strategy: object) -> bool:
    """Return True if ``strategy`` is the path of a saved plan (a .yaml file)."""
    return isinstance(strategy, str) and strategy.lower().endswith((".yaml", ".yml"))


def is_strategy(name: str) -> bool:
    """Return True if lockstep, an extension or another installed package provides a strategy of this name."""
    return name in NAMES or (name not in REFUSED and name != "auto" and extensions.is_known("strategies", name))


def class_of(name: str) -> type[Strategy]:
    """Import and return the strategy class for a name. ``import lockstep`` itself imports no engine."""
    found: type[Strategy]
    if name in NAMES:
        file, _, kind = NAMES[name][0].rpartition(".")
        found = getattr(import_module(f"lockstep.engines.{file}"), kind)
    else:
        found = extensions.load("strategies", name)
    return found


def drives_all_devices(strategy: str | Strategy) -> bool:
    """Return True if one process of a strategy uses all devices of its node; otherwise each rank has one device."""
    if not isinstance(strategy, str):
        return bool(getattr(strategy, "drives_all_devices", False))
    if is_plan(strategy):
        return bool(extensions.load("services", "saved plans").drives_all_devices(strategy))
    name = strategy.lower()
    # another distribution may have a function instead of a class; its strategy then has a device for each rank
    return is_strategy(name) and bool(getattr(class_of(name), "drives_all_devices", False))


def make_strategy(strategy: str | Strategy, world_size: int, interactive: bool = False) -> Strategy:
    """Return the strategy object for ``Trainer(strategy=...)``.

    Args:
        strategy: a name, "auto" (one process: single device; several: ddp, and ddp_notebook in a notebook), the file of
            a plan ("plan.yaml"), or a Strategy.
        world_size: number of ranks of the run.
        interactive: True if there is no script that could be started once for each rank.

    Raises:
        MisconfigurationException: the name is unknown or not supported, or the strategy supports one rank and the run
            has several.
    """
    if isinstance(strategy, str) and is_plan(strategy):
        by_plan: Strategy = extensions.load("services", "saved plans").strategy_by(strategy, world_size, interactive)
        return by_plan
    if isinstance(strategy, str):
        strategy = strategy.lower()
    if strategy == "auto" and world_size > 1:
        strategy = "ddp_notebook" if interactive else "ddp"
    made = strategy if isinstance(strategy, Strategy) else _named(strategy, interactive and world_size > 1)
    made = made.instead or made
    if world_size > 1 and made.launcher is None:
        name = f'"{strategy}"' if isinstance(strategy, str) else f"{type(made).__name__}()"
        raise MisconfigurationException(
            f"Trainer(strategy={name}) supports one rank, but devices and num_nodes request {world_size}. Use "
            'devices=1 or strategy="ddp".'
        )
    return made


def _named(strategy: object, spawns: bool) -> Strategy:
    if strategy == "auto":
        return SingleDeviceStrategy()
    if isinstance(strategy, str) and is_strategy(strategy):
        arguments: Mapping[str, Any] = (
            NAMES[strategy][1] if strategy in NAMES else extensions.strategies().get(strategy, {})
        )
        if spawns and strategy in WITHOUT_NOTEBOOK_NAME:
            arguments = {**arguments, **SPAWN}
        made = class_of(strategy)(**arguments)
        if not isinstance(made, Strategy):
            raise MisconfigurationException(
                f'The entry point of Trainer(strategy="{strategy}") returned a {type(made).__name__}, not a Strategy.'
            )
        return made
    if isinstance(strategy, str) and strategy in REFUSED:
        raise MisconfigurationException(f'Trainer(strategy="{strategy}") is not supported: {REFUSED[strategy]}.')
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise MisconfigurationException(
            f"Trainer(strategy={strategy.__name__}) is a class, but must be an object: use {strategy.__name__}()."
        )
    near = difflib.get_close_matches(str(strategy), [*NAMES, *extensions.strategies()], n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise MisconfigurationException(
        f'Trainer(strategy={strategy!r:.100}) is not a known strategy. Use "auto", "single_device", "ddp", "fsdp", '
        f'"ddp_spawn", or an object of a lockstep Strategy class.{hint}'
    )
