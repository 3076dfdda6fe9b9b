"""Has Trainers take the ranks that are there: the devices of their flags are those of another machine."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from lockstep.verify.imports import Change
from lockstep.verify.settings import Settings
from lockstep.verify.watch import put

_HOMES = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
    "lockstep.trainer": "Trainer",
}


def changes(settings: Settings) -> dict[str, Change]:
    """What is changed in the modules that define a Trainer, by their names."""
    return dict.fromkeys(_HOMES, functools.partial(_change, settings))


def _change(settings: Settings, module: ModuleType) -> None:
    """Have the class of a module take the ranks that are there."""
    kind = getattr(module, _HOMES[module.__name__])
    made = kind.__init__

    @functools.wraps(made)
    def init(trainer: object, *args: Any, **kwargs: Any) -> None:
        kwargs = {**kwargs, "devices": settings.world, "num_nodes": 1, "accelerator": "cpu"}
        if settings.strategy and settings.world > 1:
            kwargs["strategy"] = settings.strategy
        if kind.__name__ == "Trainer":
            kwargs.setdefault("default_root_dir", str(settings.own_folder))
        made(trainer, *args, **kwargs)

    put(kind, "__init__", init)
