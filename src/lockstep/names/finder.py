"""Finds modules by Lightning's import paths: ``from lockstep.<path in Lightning> import name`` works, or says why not.

One finder stands before Python's own. Asked for a module below ``lockstep`` it gives

- the module of an extension that answers to this path (`lockstep.ground.extensions`): one module, whatever path it is
  asked for by;
- the file of lockstep that has this path, if there is one. Files in `COMPLETED` answer besides for the names that
  Lightning has there and lockstep has elsewhere;
- else, for a module of the table (`lockstep.names.table`), a module whose names are fetched when they are first used;
- for a path that an earlier release of lockstep had, the module that has moved;
- or an ImportError that says why the module is refused, and what to do. A refused name is no attribute of its module
  (``hasattr`` is False), and the statement that imports it gets the ImportError.

``lockstep.pytorch.<path>`` is the same module as ``lockstep.<path>``, for ``lightning.pytorch.<path>``.

Where a script for Lightning runs unchanged (`lockstep.lightning`), the finder answers for the packages of Lightning and
for test_tube, too. Their modules are modules of their own, which take their names from those of lockstep. There a
refused name that is spelt like a class is a class, which can be imported, derived from and asked for by
``isinstance``: making an object of it raises the reason.

The objects are those of the files where they are written (their ``__module__`` says so), so pickles do not depend on
the path.
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
from lockstep.ground.errors import asked_by, refused_class, way_out
from lockstep.ground.installed import ALIASES
from lockstep.names.table import Refused, Row, Rows, moved, refusal, table

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

ROOT = "lockstep"
LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric")
TEST_TUBE = "test_tube"
"""The package of 2019 whose parser and cluster scripts for Lightning used."""

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
"""Files of lockstep that have rows in the table, or modules below them there: for others it need not be read."""

CLASS = r"_*[A-Z]\w*[a-z]\w*"
"""How the name of a class is spelt."""

UNKNOWN = "lockstep has nothing by this name."


# -- the finder ------------------------------------------------------------------------------------------------


class Finder(MetaPathFinder):
    """Finds modules by Lightning's import paths.

    Attributes:
        version: of Lightning, for which lockstep stands; None: only paths below ``lockstep`` are answered.
    """

    version: str | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module; None for any other, which Python's own finders look for.

        Raises:
            ModuleNotFoundError: the module is refused; or it is one of Lightning's that lockstep does not have.
        """
        root, _, name = fullname.partition(".")
        if root == ROOT and name:
            return _below_lockstep(fullname, name, path)
        if self.version is not None and root in (*LIGHTNINGS, TEST_TUBE):
            return _of_lightning(fullname, self.version)
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """What ``importlib.metadata`` is told of Lightning's packages, where it asks for one of them by name."""
        name = getattr(context, "name", None)
        if self.version is None or name is None or name.lower().replace("-", "_") not in LIGHTNINGS:
            return ()
        return (_distribution(name.replace("_", "-"), self.version),)


FINDER = Finder()


def install() -> None:
    """Answer for Lightning's paths, from now on; called once, when ``lockstep`` is imported."""
    ALIASES.install(put_first)
    Answers(sys.modules[ROOT])


def put_first() -> Callable[[], object]:
    """Put the finder before all others; gives what takes it away."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    sys.meta_path.insert(0, FINDER)
    return lambda: sys.meta_path.remove(FINDER)


def _below_lockstep(fullname: str, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    first, _, rest = name.partition(".")
    if first == "pytorch":
        return ModuleSpec(fullname, _SameModule(f"{ROOT}.{rest}".rstrip(".")))
    # before Python's own, which would make a second module of a file that is asked for by its former path
    home = extensions.home_of(name)
    if home is not None and _exists(home):
        return ModuleSpec(fullname, _SameModule(home))
    if first == "parallel" and rest and home is None:
        return _moved(fullname, name)
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.origin is not None:  # without origin: a folder that holds no __init__
        return _completing(spec) if name in COMPLETED else spec
    elsewhere = _moved(fullname, name)
    if elsewhere is not None:
        return elsewhere
    rows = table()["pytorch"].get(name)
    reason: str | None = rows if isinstance(rows, Refused) else refusal(*name.rpartition(".")[::2])
    if reason is not None:
        # without its name: `from lockstep import fabric` would drop an error that says which module is missing
        raise ModuleNotFoundError(f"{fullname}: {reason}")
    absent = extensions.absent(name)
    if absent is not None:
        raise ModuleNotFoundError(absent)
    return None if rows is None else ModuleSpec(fullname, _Names(), origin="lockstep.names", is_package=True)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its extension has been deleted
        return False


def _moved(fullname: str, name: str) -> ModuleSpec | None:
    """The spec of a module by a path of earlier releases of lockstep; the modules below it have moved with it."""
    homes = moved()
    before, rest = name, ""
    while before and before not in homes:
        before, _, last = before.rpartition(".")
        rest = f".{last}{rest}"
    if not before or (rest and not homes[before]):
        return None
    if not homes[before]:  # a folder that is gone
        return ModuleSpec(fullname, _Names(), origin="lockstep.names", is_package=True)
    return ModuleSpec(fullname, _SameModule(f"{ROOT}.{homes[before]}{rest}"))


def _of_lightning(fullname: str, version: str) -> ModuleSpec:
    found = lightnings(fullname)
    if found is None:
        module, _, name = fullname.rpartition(".")
        _, rows = lightnings(module) or (None, {})
        row = rows if isinstance(rows, Refused) else rows.get(name)
        reason = row if isinstance(row, Refused) else UNKNOWN
        # without its name, too
        raise ModuleNotFoundError(f"{module}.{name}, which {asked_by()} asks for: {reason} {way_out()}")
    return ModuleSpec(fullname, _Names(*found, version), is_package=True)


def lightnings(fullname: str) -> tuple[str | None, Rows | Refused] | None:
    """Lockstep's module with the names of one of Lightning's, and its rows; None where the table does not have it."""
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


class Answers:
    """Has a module answer for rows of the table and for the modules below it, when they are asked for.

    Args:
        module: it stays a plain module.
        rows: of a module of Lightning's; None: those of the module's path below ``lockstep``, which are looked up when
            a name is missing.
        home: a module of lockstep that has the other names.
    """

    def __init__(self, module: ModuleType, rows: Rows | Refused | None = None, home: ModuleType | None = None) -> None:
        names = self._names = vars(module)
        self._module, self._given, self._home = module.__name__, rows, home
        self._own: Callable[[str], Any] | None = names.get("__getattr__")
        self._listed: Callable[[], Iterable[str]] = names.get("__dir__", names.keys)
        names.update(__getattr__=self.value, __dir__=self.names)
        names.setdefault("__path__", [])  # a file, and a package in Lightning: the finder is asked for what is below

    @property
    def rows(self) -> Rows:
        """The module's rows; none where all of it is refused."""
        path = self._module.removeprefix(ROOT).lstrip(".")
        rows = table()["pytorch"].get(path, {}) if self._given is None else self._given
        return {} if isinstance(rows, Refused) else rows

    def names(self) -> list[str]:
        """The names that the module has, for ``dir``."""
        rows = (name for name, row in self.rows.items() if not isinstance(row, Refused))
        return sorted({*self._listed(), *rows, *(() if self._home is None else dir(self._home))})

    def value(self, name: str) -> Any:
        """What a name of the module is; kept in the module from then on.

        Raises:
            AttributeError: there is no such name, or it is refused: the message says why.
        """
        if self._own is not None:
            with suppress(AttributeError):
                return self._own(name)
        said = f"module {self._module!r} has no attribute {name!r}"
        if name.startswith("__"):
            raise AttributeError(said)
        full = f"{self._module}.{name}"
        try:
            if FINDER.find_spec(full, self._names["__path__"]) is not None:
                return import_module(full)
        except ModuleNotFoundError as error:
            said = str(error)
        if not self._keeps(name):
            raise AttributeError(said)
        return self._names[name]

    def _keeps(self, name: str) -> bool:
        """Whether there is an object by this name, which the module has from now on."""
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
    """The object that a row stands for.

    Args:
        row: a home.
        name: as it is imported; a home without ``:name`` has it by this name.
    """
    home, _, attribute = row.partition(":")
    module = import_module(home if home.startswith(("torch.", "rich.")) else f"{ROOT}.{home}")
    value = getattr(module, attribute or name)
    evaluate(value)
    return value


class _Names(Loader):
    """Makes a module of which no file is there.

    Args:
        home: the module of lockstep that one of Lightning's stands for.
        rows: as of `Answers`.
        version: of Lightning.
    """

    def __init__(self, home: str | None = None, rows: Rows | Refused | None = None, version: str = "") -> None:
        self._home, self._rows, self._version = home, rows, version

    def exec_module(self, module: ModuleType) -> None:
        home = None if self._home is None else import_module(self._home)
        rows = Answers(module, self._rows, home).rows
        module.__doc__ = f"Lightning's names of {module.__name__}, from where lockstep has them."
        module.__file__ = __file__ if home is None else home.__file__
        own = [name for name, value in vars(home or module).items() if getattr(value, "__module__", "") == self._home]
        public = {*getattr(home, "__all__", own), *(name for name in rows if not isinstance(rows[name], Refused))}
        vars(module)["__all__"] = sorted(name for name in public if not name.startswith("_"))
        if module.__name__ in (*LIGHTNINGS, "lightning.pytorch", "lightning.fabric"):
            vars(module)["__version__"] = self._version


class _SameModule(Loader):
    """Gives a module that is there under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the file, for ``python -m`` of the second name."""
        spec = find_spec(self.target)
        return None if spec is None else spec.loader.get_code(self.target)  # type: ignore[union-attr]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just put the second name's there


def _completing(spec: ModuleSpec) -> ModuleSpec:
    """``spec``, whose loader has the module answer for its rows when the file has run."""
    run = spec.loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        run(module)
        Answers(module)

    spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


# -- the names of a face --------------------------------------------------------------------------------------


def listed(face: str, files: Iterable[str]) -> list[str]:
    """The names of a face and of the extensions that add to it, for its ``__all__``."""
    return sorted({*files, *_names_of_extensions(face)})


def _names_of_extensions(face: str) -> dict[str, str]:
    return extensions.names_of(face.removeprefix(ROOT).lstrip("."))


def late(face: str, files: Mapping[str, str], name: str) -> Any:
    """What a name of a face stands for, for the face's ``__getattr__``; the face keeps it.

    A face is a file that imports the names which users import from there when somebody asks for them: it costs what is
    used of it.

    Args:
        face: the ``__name__`` of the face.
        files: by name the file where it is written, as seen from the face: ``"base"``, or ``".engines.strategy"`` for
            one beside the face. The names of extensions come besides.
        name: that is asked for.

    Raises:
        AttributeError: it is no name of the face.
        ImportError: its file cannot be imported.
    """
    home = f".{files[name]}" if name in files else _names_of_extensions(face).get(name)
    if home is None:
        raise AttributeError(f"module {face!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(home, face), name)
    except AttributeError as error:  # from within the file: Python would say that the face has no such name
        raise ImportError(f"{face}.{name} cannot be imported: {type(error).__name__}: {error}") from error
    evaluate(value)
    setattr(sys.modules[face], name, value)
    return value
