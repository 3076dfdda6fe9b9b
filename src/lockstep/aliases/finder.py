"""Makes ``from lockstep.<path in Lightning> import <name>`` work: modules that exist only as rows of the table.

``install`` puts one finder before Python's own. Asked for a module of the table it

- makes it, where no file has this name: an *alias module*, whose names are fetched when they are first used;
- or completes the file's module by the names that Lightning has there and lockstep elsewhere;
- or refuses it, by an ImportError that says why and what to do.

``lockstep.pytorch.<path>`` is the same module as ``lockstep.<path>``, for ``lightning.pytorch.<path>``. The objects
are those of the files where they are written (their ``__module__`` says so), so pickles do not depend on the path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lockstep.aliases.table import MODULES, Refused, Row, Rows
from lockstep.ground.installed import ALIASES

ROOT = "lockstep"


def install() -> None:
    """Answer imports from the table, from now on; called once, when ``lockstep`` is imported."""
    ALIASES.install(_put)
    for name, rows in MODULES.items():
        there = sys.modules.get(f"{ROOT}.{name}" if name else ROOT)
        if there is not None:
            complete(there, rows if isinstance(rows, dict) else {})


def _put() -> Callable[[], object]:
    finder = AliasFinder()
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)


class AliasFinder(MetaPathFinder):
    """Finds the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for any other, which Python's own finders look for.

        Raises:
            ModuleNotFoundError: the table refuses the module.
        """
        root, _, name = fullname.partition(".")
        if root != ROOT or not name:
            return None
        first, _, rest = name.partition(".")
        if first == "pytorch":
            return ModuleSpec(fullname, _SameModule(f"{ROOT}.{rest}".rstrip(".")))
        rows = MODULES.get(name)
        if rows is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:  # without origin: a folder that holds no __init__
            return _completing(spec, rows if isinstance(rows, dict) else {})
        if isinstance(rows, Refused):
            raise ModuleNotFoundError(f"{fullname}: {rows}", name=fullname)
        return ModuleSpec(fullname, _AliasLoader(rows), origin="lockstep.aliases", is_package=_has_children(name))


class _AliasLoader(Loader):
    """Makes a module of nothing but rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Names of Lightning's {module.__name__.removeprefix(ROOT)[1:]}, from where lockstep has them."
        vars(module)["__all__"] = sorted(name for name, row in self.rows.items() if not isinstance(row, Refused))
        complete(module, self.rows)


class _SameModule(Loader):
    """Gives a module that is there under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just put the second name's there


def _completing(spec: ModuleSpec, rows: Rows) -> ModuleSpec:
    """``spec``, whose loader completes the module when the file has run."""
    run = spec.loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        run(module)
        complete(module, rows)

    spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


def complete(module: ModuleType, rows: Rows) -> None:
    """Have ``module`` answer for the names of ``rows`` and for the modules below it, when they are asked for."""
    names: Any = vars(module)
    own: Callable[[str], Any] | None = names.get("__getattr__")
    listed: Callable[[], Sequence[str]] | None = names.get("__dir__")

    def __getattr__(name: str) -> Any:
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                return fetch(module, rows, name)
        return fetch(module, rows, name)

    def __dir__() -> list[str]:
        found = {name for name, row in rows.items() if not isinstance(row, Refused)}
        return sorted(found.union(listed() if listed is not None else names))

    names["__getattr__"], names["__dir__"] = __getattr__, __dir__
    if "__path__" not in names and _has_children(module.__name__.removeprefix(ROOT + ".")):
        names["__path__"] = []  # a file, and a package in Lightning: what is below it is in the table


def fetch(module: ModuleType, rows: Rows, name: str) -> Any:
    """What ``module.name`` is: an object from its row, or a module below; kept in the module from then on.

    Raises:
        AttributeError: neither.
        ImportError: the row refuses it.
    """
    row = rows.get(name)
    if row is not None:
        value = resolve(row, name, f"{module.__name__}.{name}")
        setattr(module, name, value)
        return value
    if not name.startswith("_") and hasattr(module, "__path__"):
        full = f"{module.__name__}.{name}"
        if find_spec(full) is not None:
            return import_module(full)
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


def resolve(row: Row, name: str, asked: str) -> Any:
    """The object that a row stands for.

    Args:
        row: of the table.
        name: as it is imported; a home without ``:name`` has it by this name.
        asked: the full path, for the message.

    Raises:
        ImportError: the row refuses it; the message says why.
    """
    if isinstance(row, Refused):
        raise ImportError(f"{asked}: {row}", name=asked)
    home, _, attribute = row.partition(":")
    return getattr(import_module(home if home.startswith(("torch.", "rich.")) else f"{ROOT}.{home}"), attribute or name)


def _has_children(name: str) -> bool:
    return any(module.startswith(f"{name}.") for module in MODULES)


# -- the names of a face --------------------------------------------------------------------------------------


def late(face: str, files: Mapping[str, str], name: str) -> Any:
    """What a name of a face stands for, for the face's ``__getattr__``; the face keeps it.

    Args:
        face: the ``__name__`` of the face.
        files: by name the file where it is written, as seen from the face: ``"base"``, or ``".tuner.lr_finder"`` for
            one beside the face.
        name: that is asked for.

    Raises:
        AttributeError: it is no name of the face.
    """
    if name not in files:
        raise AttributeError(f"module {face!r} has no attribute {name!r}")
    value = getattr(import_module(f".{files[name]}", face), name)
    setattr(sys.modules[face], name, value)
    return value
