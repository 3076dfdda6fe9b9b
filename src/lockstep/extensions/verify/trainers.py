"""Has Trainers take the ranks that are there: the devices of their flags are those of another machine."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lockstep.extensions.verify.imports import Change
from lockstep.extensions.verify.settings import Settings
from lockstep.extensions.verify.watch import put

_HOMES = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
    "lockstep.trainer": "Trainer",
}


def changes(settings: Settings) -> dict[str, Change]:
    """What is changed in the modules that define a Trainer, by their names."""
    found: dict[str, Change] = dict.fromkeys(_HOMES, functools.partial(_change, settings))
    if settings.simulated:
        found["lockstep.cluster.meeting"] = _meet_nobody
        found["lockstep.ground.agreement"] = _agree_alone
    if settings.is_replay and not settings.apart:
        found["lockstep.data.source"] = functools.partial(_count_global_batches, settings)
    return found


def _count_global_batches(settings: Settings, module: ModuleType) -> None:
    """Have lockstep plan as many micro-batches as the ranks made: each is fed the samples of all of them."""
    made, ranks = module.Sampling.of, len(list(settings.folder_of_ranks.glob("rank-*")))

    def of(*args: Any, **kwargs: Any) -> Any:
        sampling = made(*args, **kwargs)
        size = None if sampling.batch_size is None or sampling.single else sampling.batch_size * ranks
        return sampling._replace(batch_size=size or sampling.batch_size)

    put(module.Sampling, "of", of)


def _meet_nobody(module: ModuleType) -> None:
    """Have ranks of lockstep's that are alone wait for no others at a port."""
    put(module, "meet", lambda *given: dist.HashStore())


def _agree_alone(module: ModuleType) -> None:
    """Have them ask no others whether to stop."""
    made = module.ConsensusFlags.__init__

    @functools.wraps(made)
    def init(flags: object, *args: Any, **kwargs: Any) -> None:
        made(flags, *args, **{**kwargs, "alone": True})

    put(module.ConsensusFlags, "__init__", init)


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
