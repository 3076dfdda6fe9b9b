"""The text of a script, edits at the places of its syntax tree, and the names that it has of Lightning."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

ROOT = "lockstep"
PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric", "lightning")
"""What Lightning was imported as, the longer names first."""


@dataclass(frozen=True)
class Note:
    """Something to tell of a line."""

    line: int
    text: str
    by_hand: bool = True  #: something is to be done; else something behaves otherwise


# -- text and its tree ---------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """Lines as Python counts them: str.splitlines ends lines at other characters, too."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


@dataclass(frozen=True)
class Item:
    """An element of a list with commas: an argument, an item of a dict, a name of an import."""

    start: int
    end: int


class Text:
    """The text of a script, and edits at the places of its syntax tree."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.tree = ast.parse(text, name)
        lines = lines_of(text)
        self._lines = [line.encode() for line in lines]
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def start(self, node: Any) -> int:
        """Where a node begins; a keyword argument, with its name."""
        return self._at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        """Where a node ends."""
        return self._at(node.end_lineno, node.end_col_offset)

    def of(self, node: Any) -> str:
        """The text of a node."""
        return self.text[self.start(node) : self.end(node)]

    def line_start(self, at: int) -> int:
        """The beginning of the line of a place."""
        return max(self.text.rfind(end, 0, at) for end in "\r\n") + 1

    def indent(self, at: int) -> str:
        """What stands before a place on its line, where that is blank; else the line's own indentation."""
        return re.match(r"[ \t]*", self.text[self.line_start(at) :])[0]  # type: ignore[index]  # it always matches

    def replace(self, start: int, end: int, text: str) -> None:
        """Put ``text`` in the place of what is there."""
        if (start, end, text) not in self._edits:
            self._edits.append((start, end, text))

    def insert_before(self, node: Any, text: str) -> None:
        """Put whole lines before the line on which a node begins, indented as it is."""
        start = self.line_start(self.start(node))
        newline = "\r\n" if "\r\n" in self.text else "\n"
        self.replace(start, start, text.replace("\n", newline))

    def rest_of_line(self, at: int) -> re.Match[str]:
        """A comma, blanks and a comment behind a place, up to the next line; an empty match where more stands there."""
        found = re.compile(r"[ \t]*,?[ \t]*(?:#[^\r\n]*)?(?:\r\n|\r|\n|$)|").match(self.text, at)
        assert found is not None
        return found

    def remove(self, items: Sequence[Item], gone: Iterable[int]) -> None:
        """Take elements out of a list with commas; an element that has lines of its own goes with its lines."""
        gone = set(gone)
        for first in sorted(at for at in gone if at - 1 not in gone):
            last = first
            while last + 1 in gone:
                last += 1
            start, end = items[first].start, items[last].end
            line, rest = self.line_start(start), self.rest_of_line(end)
            if not self.text[line:start].strip() and rest[0]:
                self.replace(line, rest.end(), "")
            elif last + 1 < len(items):
                self.replace(start, items[last + 1].start, "")
            elif first:
                self.replace(items[first - 1].end, end, "")
            else:
                comma = re.compile(r"\s*,|").match(self.text, end)
                self.replace(start, end if comma is None else comma.end(), "")

    def again(self, node: Any) -> str:
        """What stands for a node in the text of an edit: the node's own text, with the edits inside it."""
        return f"\0{self.start(node)}:{self.end(node)}\0"

    def edited(self, first: int = 0, last: int | None = None) -> str:
        """The text, or a part of it, with all edits; one that lies in the place of another, larger one is left out."""
        last = len(self.text) if last is None else last
        text, upto = [], first
        for start, end, new in sorted(self._edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
            if upto <= start and end <= last:
                text += [self.text[upto:start], new]
                upto = end
        whole = "".join([*text, self.text[upto:last]])
        return re.sub("\0(\\d+):(\\d+)\0", lambda found: self.edited(int(found[1]), int(found[2])), whole)


# -- names ---------------------------------------------------------------------------------------------------


def home_of(module: str) -> str | None:
    """The path that a module of Lightning's has in lockstep; None for other packages.

    Example:
        >>> home_of("pytorch_lightning.callbacks"), home_of("lightning.pytorch"), home_of("torch")
        ('lockstep.callbacks', 'lockstep', None)
    """
    package = next((name for name in PACKAGES if module == name or module.startswith(f"{name}.")), None)
    if package is None:
        return None
    path = ROOT + module[len(package) :]
    return "torchmetrics" + path[len(f"{ROOT}.metrics") :] if re.match(rf"{ROOT}\.metrics\b", path) else path


OF_OLD = re.compile(
    rf"{ROOT}\.(callbacks\.(base|gpu_stats_monitor|progress\.base|pt_callbacks)|core\.(decorators|lightning|memory|"
    r"step_result)|loggers\.(base|test_tube)|logging|models\.trainer|overrides\.data_parallel|plugins\.training_type|"
    r"profiler|root_module\.(decorators|root_module)|trainer\.supporters|utilities\.(cli|distributed|model_utils|seed))"
)
"""Modules of years ago, whose names are elsewhere today; a test compares them with the table of aliases."""


@functools.cache
def refusal(path: str) -> str | None:
    """Why a name cannot be imported from lockstep; None where it can be."""
    module, _, name = path.rpartition(".")
    try:
        if module:
            getattr(import_module(module), name)
        else:
            import_module(name)
    except ImportError as error:
        reason = str(error).partition(": ")[2]
        return reason or "lockstep has no such module; docs/lightning.md has the names that there are."
    except AttributeError as error:
        reason = str(error).partition(f"{path}: ")[2]
        return reason or "lockstep has nothing of this name; docs/lightning.md has the names that there are."
    return None


@functools.cache
def is_module(path: str) -> bool:
    """Whether a path is a module of lockstep, or one that it refuses by a sentence."""
    try:
        import_module(path)
    except ImportError as error:
        return not str(error).startswith("No module named")
    return True


DATA_LOADER, AUTO_MOVE = refusal(f"{ROOT}.data_loader"), refusal(f"{ROOT}.core.auto_move_data")
FABRIC, METRICS = str(refusal(f"{ROOT}.fabric")), str(refusal(f"{ROOT}.metrics"))
TEST_TUBE = str(refusal(f"{ROOT}.loggers.test_tube"))
SEARCHES = ("HyperOptArgumentParser", "SlurmCluster")
"""Names of test_tube that lockstep has."""

FACES = ("", "callbacks", "loggers", "utilities", "strategies", "profilers", "cli", "plugins.environments")


def face_of(names: Sequence[str]) -> str | None:
    """The module that users import these names from."""
    for face in FACES:
        path = f"{ROOT}.{face}".rstrip(".")
        if all(name in dir(import_module(path)) and refusal(f"{path}.{name}") is None for name in names):
            return path
    return None


class Script(Text):
    """A script, the names that it has of Lightning, and what is to be told of it."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.names: dict[str, str] = {}  #: a name of the script's to what it is in lockstep, ``lockstep.Trainer``
        self.notes: list[Note] = []
        self._bare: set[str] = set()  #: packages imported under their own names
        self._imported: dict[str, ast.stmt] = {}
        stored = (n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
        self._stored = {*stored, *(n.arg for n in ast.walk(self.tree) if isinstance(n, ast.arg))}

    def note(self, node: Any, text: str) -> None:
        """Tell what is to be done by hand."""
        self.notes.append(Note(node.lineno, text))

    # -- imports -------------------------------------------------------------------------------------------

    def move_imports(self) -> bool:
        """Change every import; tells whether there was one of Lightning."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(node, alias)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Name):
                self._use(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = re.match(r"(lightning\.pytorch|pytorch_lightning)(\.|$)", node.value)
                if found and self.names:
                    self.note(node, f"the text {node.value!r:.60} names Lightning: {ROOT} where lockstep is meant.")
        return bool(self.names)

    def _import(self, node: ast.Import, alias: ast.alias) -> None:
        if alias.name.partition(".")[0] == "test_tube":
            self.note(node, f"test_tube: {TEST_TUBE}")
        home = home_of(alias.name)
        if home is None:
            return
        first = alias.name.partition(".")[0]
        if "fabric" in alias.name:
            self.note(node, FABRIC)
            return
        new, known = home, alias.asname or first
        if alias.asname is not None or (first in self._stored and alias.name == first):
            new += f" as {known}"
        elif first in self._stored:
            self.note(node, f"import {alias.name}: the script uses {first!r} for something else, too; change it here.")
            return
        else:
            self._bare.add(first)
        self.names[known] = ROOT if alias.asname is None else home
        self._imported[known] = node
        self.replace(self.start(alias), self.end(alias), new)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = str(node.module)
        if module.partition(".")[0] == "test_tube":
            self._from_test_tube(node)
            return
        home, gone = home_of(module), []
        if home is None:
            return
        if home.startswith("torchmetrics"):
            self.note(node, METRICS + " Those of classification need `task=` today.")
        if module == "lightning" and any(alias.name == "pytorch" for alias in node.names):
            self._from_lightning(node)
            return
        if OF_OLD.fullmatch(home) or "fabric" in module:
            home = face_of([alias.name for alias in node.names]) or home
        for at, alias in enumerate(node.names):
            path = f"{home}.{alias.name}"
            if alias.name == "*":
                why = refusal(home)
                names = getattr(import_module(home), "__all__", ()) if why is None else ("*",)
                self.names.update({name: f"{home}.{name}" for name in names})
                self._imported.update(dict.fromkeys(names, node))
                if why is not None:
                    self.note(node, f"from {module} import *: {why}")
                continue
            self.names[alias.asname or alias.name] = path
            self._imported[alias.asname or alias.name] = node
            why = refusal(path) if path.startswith(ROOT) else None
            if why in (DATA_LOADER, AUTO_MOVE):
                gone.append(at)
            elif why is not None:
                self.note(node, f"{alias.name}: {why}")
        found = re.compile(r"from\s+([\w.]+)").match(self.text, self.start(node))
        if len(gone) == len(node.names):
            rest = self.rest_of_line(self.end(node))
            self.replace(self.line_start(self.start(node)), rest.end(), "")
        elif found is not None:
            self.replace(found.start(1), found.end(1), home)
            self.remove([Item(self.start(alias), self.end(alias)) for alias in node.names], gone)

    def _from_test_tube(self, node: ast.ImportFrom) -> None:
        """``from test_tube import HyperOptArgumentParser, SlurmCluster``: both are lockstep's today."""
        others = [alias.name for alias in node.names if alias.name not in SEARCHES]
        if others:
            self.note(node, f"{', '.join(others)} of test_tube: {TEST_TUBE}")
        if len(others) == len(node.names):
            return
        if others:
            self.note(node, f"{' and '.join(SEARCHES)} of test_tube are lockstep's: from {ROOT} import them.")
            return
        names = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names]
        self.names.update({alias.asname or alias.name: f"{ROOT}.{alias.name}" for alias in node.names})
        self._imported.update({alias.asname or alias.name: node for alias in node.names})
        self.replace(self.start(node), self.end(node), f"from {ROOT} import {', '.join(names)}")

    def _from_lightning(self, node: ast.ImportFrom) -> None:
        """``from lightning import pytorch as pl, seed_everything``"""
        lines, names = [], []
        for alias in node.names:
            known = alias.asname or alias.name
            self.names[known] = ROOT if alias.name == "pytorch" else f"{ROOT}.{alias.name}"
            self._imported[known] = node
            if alias.name == "pytorch":
                lines.append(f"import {ROOT} as {known}")
            else:
                names.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if names:
            lines.append(f"from {ROOT} import {', '.join(names)}")
        start = self.start(node)
        self.replace(start, self.end(node), f"\n{self.indent(start)}".join(lines))

    def _use(self, node: ast.Attribute | ast.Name) -> None:
        """A use of a package by its own name: ``lightning.pytorch.Trainer``; and of what lockstep refuses."""
        path = ast.unparse(node) if _is_chain(node) else ""
        if path in PACKAGES and path.partition(".")[0] in self._bare:
            self.replace(self.start(node), self.end(node), ROOT)
        if isinstance(node, ast.Attribute):
            found = self.meant(node)
            if found is not None and found.startswith(f"{ROOT}.metrics"):
                self.note(node, f"{ast.unparse(node)}: {METRICS}")
            elif found is not None and (why := refusal(found)) not in (None, DATA_LOADER, AUTO_MOVE):
                self.note(node, f"{ast.unparse(node)}: {why}")
            elif found == f"{ROOT}.__version__":
                self.note(node, f"{ast.unparse(node)} is lockstep's version, not Lightning's.")

    def meant(self, node: ast.AST | None) -> str | None:
        """What an expression is in lockstep: ``pl.callbacks.Timer`` is ``lockstep.callbacks.Timer``; None: unknown."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if _is_chain(node) and whole.partition(".")[0] in self._bare:
                return home_of(whole)
            base = self.meant(node.value)
            return f"{base}.{node.attr}" if base is not None and base.startswith(ROOT) and is_module(base) else None
        return None

    def spelled(self, path: str, beside: str) -> str:
        """How the script writes a class of lockstep; an import of it is added where there is none.

        Args:
            path: ``callbacks.EarlyStopping``, say.
            beside: a name of the script's, beside whose import the new one is to stand.
        """
        name = path.rpartition(".")[2]
        by_name = next((known for known, meant in self.names.items() if meant == f"{ROOT}.{path}"), None)
        by_root = next((known for known, meant in self.names.items() if meant == ROOT), None)
        if by_name is not None:
            return by_name
        if by_root is not None:
            return f"{ROOT if by_root in self._bare else by_root}.{path}"
        node = self._imported[beside]
        self.insert_before(
            node, f"{self.indent(self.start(node))}from {ROOT}.{path.rpartition('.')[0]} import {name}\n"
        )
        self.names[name] = f"{ROOT}.{path}"
        return name

    # -- what there is -------------------------------------------------------------------------------------

    def calls(self) -> Iterator[ast.Call]:
        """All calls."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    @functools.cached_property
    def trainers(self) -> frozenset[str]:
        """How the script calls its Trainers."""
        found = {"trainer", "self.trainer"}
        for node in ast.walk(self.tree):
            made = node.value if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.Assign) and (self.meant(getattr(made, "func", None)) or "").endswith(".Trainer"):
                found.update(ast.unparse(target) for target in node.targets)
        return frozenset(found)

    def classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        """The classes that derive from one of Lightning's, and from which."""
        kinds: dict[str, str] = {}
        for node in (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)):
            for base in node.bases:
                kind = kinds.get(ast.unparse(base)) or (self.meant(base) or "").rpartition(".")[2]
                kind = "Callback" if (self.meant(base) or "").startswith(f"{ROOT}.callbacks.") else kind
                if kind in ("LightningModule", "LightningDataModule", "Callback"):
                    kinds[node.name] = kind
                    yield kind, node
                    break


def _is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
