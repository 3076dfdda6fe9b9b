"""Import hook that changes Trainers' flags and mixed precision policies when a verified script imports them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.extensions.verify.settings import Settings
from lockstep.extensions.verify.watch import Watch, before_each_call, patch

Change = Callable[[ModuleType], None]

MIXED_PRECISION = "mixed precision"
"""Kind of the event for a script that requests mixed precision."""

_TRAINERS = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
    "lockstep.trainer": "Trainer",
}
"""Name of the Trainer class, by the module that defines it."""


class Imports(MetaPathFinder):
    """Import hook that applies each of ``changes`` to its module as soon as the module has been imported.

    Args:
        changes: functions that change a module, by its name.
    """

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = changes

    def install(self) -> None:
        """Change the modules that are already imported, and register the import hook for later imports."""
        for name, change in self.changes.items():
            if name in sys.modules:
                change(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader changes the module, or None if the module is not changed."""
        if fullname not in self.changes:
            return None
        # find_spec of importlib would call this finder again
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader, self.changes[fullname])
        return spec


class _ChangingLoader(Loader):
    """Loader that changes a module after another loader has loaded it."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self.loader = loader
        self.change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the wrapped loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then change it."""
        self.loader.exec_module(module)
        self.change(module)


# -- Trainers


def trainer_changes(settings: Settings) -> dict[str, Change]:
    """Return {name of a module: function that changes it}, to make Trainers use the ranks of this run."""
    found: dict[str, Change] = dict.fromkeys(_TRAINERS, functools.partial(_set_flags, settings))
    # without it, bf16=True is refused where there is no GPU
    found["transformers.training_args"] = lambda module: before_each_call(
        module.TrainingArguments, "__post_init__", lambda arguments, _: setattr(arguments, "use_cpu", True)
    )
    # it would be compiled, and no training step calls it
    found["deepspeed.comm.torch"] = lambda module: patch(module, "build_shm_op", lambda: None)
    found["deepspeed.accelerator.cpu_accelerator"] = _support_float64
    if settings.simulated:
        # ranks of lockstep's that run alone would wait for the others at a port, and for their votes to stop
        found["lockstep.cluster.rendezvous"] = lambda module: patch(
            module, "connect_ranks", lambda *args: dist.HashStore()
        )
        found["lockstep.ground.agreement"] = lambda module: before_each_call(
            module.ConsensusFlags, "__init__", lambda _, kwargs: kwargs.update(alone=True)
        )
    if settings.is_replay and not settings.rank_by_rank:
        found["lockstep.data.source"] = functools.partial(_count_global_batches, settings)
    return found


def _set_flags(settings: Settings, module: ModuleType) -> None:
    """Make the module's Trainer ignore its flags for devices and nodes, and use this run's ranks on the CPU instead."""
    kind = getattr(module, _TRAINERS[module.__name__])

    def change(_: object, kwargs: dict[str, Any]) -> None:
        kwargs.update(devices=settings.world, num_nodes=1, accelerator="cpu")
        if settings.strategy and settings.world > 1:
            kwargs["strategy"] = settings.strategy
        if kind.__name__ == "Trainer":
            kwargs.setdefault("default_root_dir", str(settings.own_folder))

    before_each_call(kind, "__init__", change)


def _support_float64(module: ModuleType) -> None:
    """Let DeepSpeed reduce gradients in float64, which it does not count among a CPU's dtypes."""
    original = module.CPU_Accelerator.supported_dtypes
    patch(module.CPU_Accelerator, "supported_dtypes", lambda own: [torch.float64, *original(own)])


def _count_global_batches(settings: Settings, module: ModuleType) -> None:
    """Multiply the batch size by the number of ranks, so that one process has as many micro-batches as a rank."""
    original, ranks = module.Sampling.of, len(list(settings.folder_of_ranks.glob("rank-*")))

    def of(*args: Any, **kwargs: Any) -> Any:
        sampling = original(*args, **kwargs)
        size = None if sampling.batch_size is None or sampling.single else sampling.batch_size * ranks
        return sampling._replace(batch_size=size or sampling.batch_size)

    patch(module.Sampling, "of", of)


# -- mixed precision


def drop_mixed_precision(watch: Watch, module: ModuleType) -> None:
    """Remove smaller dtypes from policies of `torch.distributed.fsdp`, since their rounding depends on the ranks."""
    for name in ("MixedPrecisionPolicy", "MixedPrecision"):
        kind = getattr(module, name, None)
        if kind is not None:
            original = vars(kind)["__init__"]

            @functools.wraps(original)
            def init(
                policy: object, *args: Any, name: str = name, original: Callable[..., None] = original, **kwargs: Any
            ) -> None:
                original(policy, *args, **kwargs)
                types = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
                requested = [each for each in types if getattr(policy, each, None) is not None]
                for each in requested:
                    object.__setattr__(policy, each, None)  # a policy is frozen
                if requested:
                    watch.journal.record(MIXED_PRECISION, name=name)

            patch(kind, "__init__", init)
