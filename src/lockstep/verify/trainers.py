"""Has Trainers take the ranks that are there: the devices of their flags are those of another machine."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lockstep.verify.settings import Settings
from lockstep.verify.watch import put

_HOMES = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
    "lockstep.trainer": "Trainer",
}


class Trainers(MetaPathFinder):
    """Changes a class when the module is imported that defines it.

    Args:
        settings: of this process.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def install(self) -> None:
        """Wait for the imports; change what is imported already."""
        for name in _HOMES:
            if name in sys.modules:
                self.change(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module with a Trainer, whose loader changes it; None for any other."""
        if fullname not in _HOMES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self.change)
        return spec

    def change(self, module: ModuleType) -> None:
        """Have the class of a module take the ranks that are there."""
        kind = getattr(module, _HOMES[module.__name__])
        made = kind.__init__

        @functools.wraps(made)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            kwargs = {**kwargs, "devices": self.settings.world, "num_nodes": 1, "accelerator": "cpu"}
            if self.settings.strategy and self.settings.world > 1:
                kwargs["strategy"] = self.settings.strategy
            if kind.__name__ == "Trainer":
                kwargs.setdefault("default_root_dir", str(self.settings.own_folder))
            made(trainer, *args, **kwargs)

        put(kind, "__init__", init)


class _Changing(Loader):
    """A loader that does something with the module that it has loaded."""

    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.do = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, as the other makes it."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and change it."""
        self.loader.exec_module(module)
        self.do(module)
