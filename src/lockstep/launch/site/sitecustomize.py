"""Runs when a Python process starts below one that has Lightning's names: has them answered here, too.

`lockstep.lightning` puts this file's folder on PYTHONPATH, and Python imports a module of this name at its start.
lockstep and torch are imported when somebody asks for one of the names, and not before.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

NAMES = ("lightning", "pytorch_lightning", "lightning_fabric", "test_tube")


class Waiting:
    """A finder that gives its place to lockstep's own when it is asked for one of the names."""

    asked = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module of Lightning's; None for any other."""
        if self.asked or fullname.partition(".")[0] not in NAMES:
            return None
        self.enter()
        return importlib.util.find_spec(fullname)

    def find_distributions(self, context: object = None) -> object:
        """What `importlib.metadata` is told of Lightning's packages."""
        name = getattr(context, "name", None)
        if self.asked or name is None or name.lower().replace("-", "_") not in NAMES or not self.enter():
            return ()
        return importlib.import_module("lockstep.names.finder").FINDER.find_distributions(context)

    def enter(self) -> bool:
        """Put lockstep's finder before this one; False where this Python has no lockstep."""
        self.asked = True
        try:
            importlib.import_module("lockstep.lightning").enter()
        except ModuleNotFoundError as error:
            if error.name not in ("lockstep", "lockstep.lightning"):
                raise
            return False
        return True


def run_the_next() -> None:
    """The module of this name that Python would have imported, had this one not been in front of it."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Waiting())
    run_the_next()
