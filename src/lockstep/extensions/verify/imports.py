"""Changes classes of packages when these are imported, which is where a script asks for them, if it does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


class Imports(MetaPathFinder):
    """Changes modules behind their import.

    Args:
        changes: what is done, by the names of the modules.
    """

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = changes

    def install(self) -> None:
        """Wait for the imports; change what is imported already."""
        for name, change in self.changes.items():
            if name in sys.modules:
                change(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is to be changed, whose loader does so; None for any other."""
        if fullname not in self.changes:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self.changes[fullname])
        return spec


class _Changing(Loader):
    """A loader that does something with the module that it has loaded."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self.loader = loader
        self.do = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, as the other makes it."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and change it."""
        self.loader.exec_module(module)
        self.do(module)
