"""The import finder for Lightning's import paths. It makes ``from lockstep.<path in Lightning> import name`` work.

The finder is in front of Python's own finders. For a module below ``lockstep`` it returns

- the module of an extension that has this path (`lockstep.ground.extensions`), the same module for all its paths;
- the file of lockstep that has this path, if there is one. Files in `COMPLETED` also provide names that Lightning has
  there and lockstep has elsewhere;
- otherwise, for a module of the table (`lockstep.names.table`), a module that imports its names when they are first
  used;
- for a path of an earlier release of lockstep, the module that has moved;
- or an ImportError with the reason why the module is refused, and what to do. A refused name is not an attribute of
  its module (``hasattr`` is False), and the statement that imports it raises the ImportError.

``lockstep.pytorch.<path>`` is the same module as ``lockstep.<path>``, for ``lightning.pytorch.<path>``.

If a script for Lightning runs unchanged (`lockstep.lightning`), the finder also handles the packages of Lightning and
test_tube. Their modules are separate modules that take their names from those of lockstep. There a refused name with
the spelling of a class is a class: it can be imported, subclassed and used in ``isinstance``, and its constructor
raises the reason.

Pickles do not depend on the path: an object's ``__module__`` is the file that defines it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.ground import extensions
from lockstep.ground.annotations import evaluate
from lockstep.ground.errors import calling_code, refused_class, way_out
from lockstep.ground.installed import ALIASES
from lockstep.names.table import Refused, Row, Rows, moved, refusal, table

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

ROOT = "lockstep"
LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric")
TEST_TUBE = "test_tube"
"""Name of a package with a parser and cluster tools that scripts for Lightning used in 2019."""

_COMPLETED = {
    "callbacks": ("", "progress", "progress.base", "timer"),
    "cli": ("",),
    "loggers": ("", "base", "mlflow"),
    "profilers": ("", "pytorch"),
    "strategies": ("",),
    "trainer": ("",),
    "tuner": ("",),
    "utilities": ("", "exceptions", "memory", "model_summary", "parsing", "rank_zero", "types"),
}
COMPLETED = frozenset(f"{part}.{name}".rstrip(".") for part, names in _COMPLETED.items() for name in names)
"""Files of lockstep for which the table has rows or submodules; for other files the table is not read."""

CLASS = r"_*[A-Z]\w*[a-z]\w*"
"""Pattern of class names."""

UNKNOWN = "lockstep has no object with this name."


# -- the finder ------------------------------------------------------------------------------------------------


class Finder(MetaPathFinder):
    """Finder in ``sys.meta_path`` for modules that have import paths of Lightning.

    Attributes:
        version: version of Lightning that lockstep replaces; None: the finder handles only paths below ``lockstep``.
    """

    version: str | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with an import path of Lightning.

        Return None if Python's own finders should search for the module.

        Raises:
            ModuleNotFoundError: lockstep does not have this module of Lightning.
        """
        root, _, name = fullname.partition(".")
        if root == ROOT and name:
            return _below_lockstep(fullname, name, path)
        if self.version is not None and root in (*LIGHTNINGS, TEST_TUBE):
            return _of_lightning(fullname, self.version)
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the distribution for a package of Lightning that ``importlib.metadata`` requests by name."""
        name = getattr(context, "name", None)
        if self.version is None or name is None or name.lower().replace("-", "_") not in LIGHTNINGS:
            return ()
        return (_distribution(name.replace("_", "-"), self.version),)


FINDER = Finder()


def install() -> None:
    """Install the finder before Python's own finders. Called once, when ``lockstep`` is imported."""
    ALIASES.install(put_first)
    TableNames(sys.modules[ROOT])


def put_first() -> Callable[[], object]:
    """Move the finder before all other finders. Return a function that removes the finder."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    sys.meta_path.insert(0, FINDER)
    return lambda: sys.meta_path.remove(FINDER)


def _below_lockstep(fullname: str, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    first, _, rest = name.partition(".")
    if first == "pytorch":
        return ModuleSpec(fullname, _SameModule(f"{ROOT}.{rest}".rstrip(".")))
    # Before Python's own finders, which would create a second module for a file that is imported by its former path.
    home = extensions.module_of(name)
    if home is not None:
        with suppress(ModuleNotFoundError):  # its extension has been deleted
            if find_spec(home) is not None:
                return ModuleSpec(fullname, _SameModule(home))
    if first == "parallel" and rest and home is None:
        return _moved(fullname, name)
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.origin is not None:  # without origin: a folder without __init__.py
        return _completing(spec) if name in COMPLETED else spec
    elsewhere = _moved(fullname, name)
    if elsewhere is not None:
        return elsewhere
    rows = table()["pytorch"].get(name)
    reason: str | None = rows if isinstance(rows, Refused) else refusal(*name.rpartition(".")[::2])
    if reason is not None:
        # Without `name=`: `from lockstep import fabric` replaces an error that names the missing module by its own.
        raise ModuleNotFoundError(f"{fullname}: {reason}")
    absent = extensions.absent(name)
    if absent is not None:
        raise ModuleNotFoundError(absent)
    return None if rows is None else ModuleSpec(fullname, _Names(), origin="lockstep.names", is_package=True)


def _moved(fullname: str, name: str) -> ModuleSpec | None:
    """Return the spec for a former module path of lockstep, or for a path below one. Return None otherwise."""
    homes = moved()
    before, rest = name, ""
    while before and before not in homes:
        before, _, last = before.rpartition(".")
        rest = f".{last}{rest}"
    if not before or (rest and not homes[before]):
        return None
    if not homes[before]:  # a folder that was removed
        return ModuleSpec(fullname, _Names(), origin="lockstep.names", is_package=True)
    return ModuleSpec(fullname, _SameModule(f"{ROOT}.{homes[before]}{rest}"))


def _of_lightning(fullname: str, version: str) -> ModuleSpec:
    found = lightnings(fullname)
    if found is None:
        module, _, name = fullname.rpartition(".")
        _, rows = lightnings(module) or (None, {})
        row = rows if isinstance(rows, Refused) else rows.get(name)
        reason = row if isinstance(row, Refused) else UNKNOWN
        # without `name=`, as above
        raise ModuleNotFoundError(f"{module}.{name}, imported by {calling_code()}: {reason} {way_out()}")
    return ModuleSpec(fullname, _Names(*found, version), is_package=True)


def lightnings(fullname: str) -> tuple[str | None, Rows | Refused] | None:
    """Return lockstep's module and the table rows for a module of Lightning. Return None if the table lacks it."""
    root, _, path = fullname.partition(".")
    if root == "lightning":
        root, _, path = path.partition(".")
    if root in ("", "pytorch", "pytorch_lightning"):
        rows, besides = table()["pytorch"].get(path), table()["third_parties"].get(path, {})
        if isinstance(rows, Refused) or rows is None:
            return None if not besides and rows is None else (None, besides or rows or {})
        return f"{ROOT}.{path}".rstrip("."), {**rows, **besides}  # type: ignore[dict-item]  # none of these is refused
    section = {"fabric": "fabric", "lightning_fabric": "fabric", TEST_TUBE: "test_tube"}.get(root)
    others = None if section is None else table()[section].get(path)
    return None if others is None else (None, others)


def _distribution(name: str, version: str) -> Distribution:
    from importlib.metadata import Distribution
    from pathlib import Path

    class Lightnings(Distribution):
        def read_text(self, filename: str) -> str | None:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            return text if filename in ("METADATA", "PKG-INFO") else None

        def locate_file(self, path: Any) -> Path:
            return Path(__file__).parent / path

    return Lightnings()


# -- the modules -----------------------------------------------------------------------------------------------


class TableNames:
    """Lazy attributes of a module, imported on first access: the names in its table rows, and its submodules.

    They replace the module's ``__getattr__`` and ``__dir__``.

    Args:
        module: the module, whose class stays `ModuleType`.
        rows: rows of a module of Lightning; None: the rows for the module's path below ``lockstep``, which are looked
            up when a name is missing.
        home: a module of lockstep that provides all other names.
    """

    def __init__(self, module: ModuleType, rows: Rows | Refused | None = None, home: ModuleType | None = None) -> None:
        names = self._names = vars(module)
        self._module, self._given, self._home = module.__name__, rows, home
        self._own: Callable[[str], Any] | None = names.get("__getattr__")
        self._listed: Callable[[], Iterable[str]] = names.get("__dir__", names.keys)
        names.update(__getattr__=self.value, __dir__=self.names)
        # A file here may be a package in Lightning: with a path, Python asks the finder for modules below it.
        names.setdefault("__path__", [])

    @property
    def rows(self) -> Rows:
        """The table rows with the module's names; empty if the whole module is refused."""
        path = self._module.removeprefix(ROOT).lstrip(".")
        rows = table()["pytorch"].get(path, {}) if self._given is None else self._given
        return {} if isinstance(rows, Refused) else rows

    def names(self) -> list[str]:
        """Return the names that ``dir`` lists for the module."""
        rows = (name for name, row in self.rows.items() if not isinstance(row, Refused))
        return sorted({*self._listed(), *rows, *(() if self._home is None else dir(self._home))})

    def value(self, name: str) -> Any:
        """Import the object with a name, store it in the module, and return it.

        Raises:
            AttributeError: the name does not exist, or it is refused for the reason in the message.
        """
        if self._own is not None:
            with suppress(AttributeError):
                return self._own(name)
        reason = f"module {self._module!r} has no attribute {name!r}"
        if name.startswith("__"):
            raise AttributeError(reason)
        full = f"{self._module}.{name}"
        try:
            if FINDER.find_spec(full, self._names["__path__"]) is not None:
                return import_module(full)
        except ModuleNotFoundError as error:
            reason = str(error)
        if not self._store(name):
            raise AttributeError(reason)
        return self._names[name]

    def _store(self, name: str) -> bool:
        """Import the object with a name, and store it in the module. Return False if there is no such object."""
        row = self._given if isinstance(self._given, Refused) else self.rows.get(name)
        if isinstance(row, Refused):
            if self._given is None or not re.fullmatch(CLASS, name):
                return False
            self._names[name] = refused_class(name, row)
        elif row is not None:
            self._names[name] = resolve(row, name)
        elif hasattr(self._home, name):
            self._names[name] = getattr(self._home, name)
        return name in self._names


def resolve(row: Row, name: str) -> Any:
    """Import the object to which a table row refers, and return it.

    Args:
        row: a row with a home.
        name: name by which it is imported, and in its home unless the row has ``:name``.
    """
    home, _, attribute = row.partition(":")
    module = import_module(home if home.startswith(("torch.", "rich.")) else f"{ROOT}.{home}")
    value = getattr(module, attribute or name)
    evaluate(value)
    return value


class _Names(Loader):
    """Loader of modules that exist in Lightning, but have no file in lockstep.

    Args:
        home: the module of lockstep whose names the module has.
        rows: as for `TableNames`.
        version: version of Lightning.
    """

    def __init__(self, home: str | None = None, rows: Rows | Refused | None = None, version: str = "") -> None:
        self._home, self._rows, self._version = home, rows, version

    def exec_module(self, module: ModuleType) -> None:
        home = None if self._home is None else import_module(self._home)
        rows = TableNames(module, self._rows, home).rows
        module.__doc__ = f"Lightning's names in {module.__name__}, imported from their modules in lockstep."
        module.__file__ = __file__ if home is None else home.__file__
        own = [name for name, value in vars(home or module).items() if getattr(value, "__module__", "") == self._home]
        public = {*getattr(home, "__all__", own), *(name for name in rows if not isinstance(rows[name], Refused))}
        vars(module)["__all__"] = sorted(name for name in public if not name.startswith("_"))
        if module.__name__ in (*LIGHTNINGS, "lightning.pytorch", "lightning.fabric"):
            vars(module)["__version__"] = self._version


class _SameModule(Loader):
    """Loader that returns an existing module under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module's file, which ``python -m`` runs for the second name."""
        spec = find_spec(self.target)
        return None if spec is None else spec.loader.get_code(self.target)  # type: ignore[union-attr]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just replaced it by the second name's


def _completing(spec: ModuleSpec) -> ModuleSpec:
    """Extend the loader of a spec: after the module's file has run, the loader adds `TableNames` to the module."""
    run = spec.loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        run(module)
        TableNames(module)

    spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


# -- the names of a face --------------------------------------------------------------------------------------


def listed(face: str, files: Iterable[str]) -> list[str]:
    """Return all names of a public module, including names from extensions, for the module's ``__all__``.

    Args:
        face: ``__name__`` of the public module.
        files: names that the module itself has.
    """
    return sorted({*files, *_names_of_extensions(face)})


def _names_of_extensions(face: str) -> dict[str, str]:
    return extensions.names_of(face.removeprefix(ROOT).lstrip("."))


def late(face: str, files: Mapping[str, str], name: str) -> Any:
    """Import an object of a public module when it is first accessed, and store it in the module.

    The module's ``__getattr__`` calls this function.

    Such a module (a face) re-exports names for users, and only names that are used cost an import.

    Args:
        face: ``__name__`` of the face.
        files: the file that defines each name, relative to the face: ``"base"``, or ``".engines.strategy"`` for a file
            next to the face. Names of extensions are added.
        name: the requested name.

    Returns:
        the object.

    Raises:
        AttributeError: the face does not have this name.
        ImportError: its file cannot be imported.
    """
    home = f".{files[name]}" if name in files else _names_of_extensions(face).get(name)
    if home is None:
        raise AttributeError(f"module {face!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(home, face), name)
    except AttributeError as error:
        # Raised within the file: Python would report that the face does not have the name.
        raise ImportError(f"{face}.{name} cannot be imported: {type(error).__name__}: {error}") from error
    evaluate(value)
    setattr(sys.modules[face], name, value)
    return value
