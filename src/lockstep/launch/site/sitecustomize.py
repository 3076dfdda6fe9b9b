"""Startup code for Python in ranks of `lockstep run`, and in processes that inherit Lightning's import names.

`lockstep run` and `lockstep.lightning` put this file's folder on PYTHONPATH, and Python imports a module of this name
at startup. lockstep and torch are imported only when one of Lightning's names is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType

HERE = os.path.dirname(os.path.abspath(__file__))
STANDS_IN, PROCESS, PATH = "LOCKSTEP_LIGHTNING", "LOCKSTEP_PROCESS", "PYTHONPATH"
NAMES = ("lightning", "pytorch_lightning", "lightning_fabric", "test_tube")


class Waiting:
    """Import finder that installs lockstep's own finder at the first import of one of Lightning's names."""

    is_replaced = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of Lightning, or None for any other module."""
        if self.is_replaced or fullname.partition(".")[0] not in NAMES:
            return None
        self.enter()
        return importlib.util.find_spec(fullname)

    def find_distributions(self, context: object = None) -> object:
        """Return the distributions of Lightning's packages, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        if self.is_replaced or name is None or name.lower().replace("-", "_") not in NAMES or not self.enter():
            return ()
        return importlib.import_module("lockstep.names.finder").FINDER.find_distributions(context)

    def enter(self) -> bool:
        """Install lockstep's import finder ahead of this one. Return False if lockstep is not installed."""
        self.is_replaced = True
        try:
            importlib.import_module("lockstep.ground.extensions").load("services", "Lightning's names").enter()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "lockstep":
                raise
            return False
        return True


class Early:
    """Exception hook (``sys.excepthook``) for a rank of `lockstep run` that has not imported lockstep yet.

    Args:
        before_lockstep: the previous hook, which lockstep restores.
    """

    def __init__(self, before_lockstep: Callable[..., object]) -> None:
        self.before_lockstep = before_lockstep

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.before_lockstep(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Report the rank, line and exception that end the script to the agent of `lockstep run`."""
        if "lockstep" not in sys.modules:  # bare: torch's import may be what failed
            package = sys.modules["lockstep"] = ModuleType("lockstep")
            package.__path__ = [os.path.dirname(os.path.dirname(HERE))]
        causes = importlib.import_module("lockstep.supervise.causes")
        called = ""
        # a syntax error of the script itself has no traceback
        if isinstance(error, SyntaxError) and error.__traceback__ is None:
            called = f"{error.filename}:{error.lineno}"
        cause = causes.cause_of(int(os.environ["RANK"]), error, called=called)
        importlib.import_module("lockstep.cluster.torchelastic").hand_cause(str(cause))


def remove_from_path() -> None:
    """Remove this folder from the module search path of the rank and its child processes."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    others = [entry for entry in os.environ.get(PATH, "").split(os.pathsep) if entry and entry != HERE]
    os.environ[PATH] = os.pathsep.join(others)
    if not others:
        del os.environ[PATH]


def run_the_next() -> None:
    """Run the next ``sitecustomize`` module on the path, which this one shadows."""
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != HERE])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get(PROCESS) == str(os.getpid()):
        sys.excepthook = Early(sys.excepthook)
    if STANDS_IN in os.environ:
        sys.meta_path.insert(0, Waiting())
    else:
        remove_from_path()
    run_the_next()
