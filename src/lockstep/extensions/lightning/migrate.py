"""``lockstep migrate``: changes a script for Lightning, of any version since 2019, so that it uses lockstep.

It prints a diff of imports and Trainer flags to stdout, and to stderr, by line, what to do by hand and what differs for
this script. It does not import or run the script, and leaves the bodies of functions unchanged. In a config (.yaml,
.json) it changes class paths. To run a script unchanged, use `lockstep run --lightning`.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lockstep.cli.run import CommandParser
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.names.class_paths import lockstep_class_path, lockstep_module, refusal
from lockstep.names.finder import ROOT
from lockstep.names.old_flags import OLD_FLAGS, REMOVED, TOGETHER, Today, Translation, meaning, old_flags_of
from lockstep.trainer import FLAGS

# -- files -----------------------------------------------------------------------------------------------------


def migrate(words: Sequence[str]) -> int:
    """Run ``lockstep migrate`` with the arguments ``words``, and return its exit code.

    Args:
        words: arguments after ``lockstep migrate``.

    Raises:
        MisconfigurationException: a file does not exist, or is not valid Python, YAML or JSON.
    """
    parser = CommandParser("lockstep migrate", None, __doc__)
    parser.add_argument("files", nargs="+", metavar="script.py", help="a script, a folder of scripts, or a config")
    parser.add_argument("--write", action="store_true", help="make the changes of the diff in the files")
    given = parser.parse_args(words)
    files = [file for path in given.files for file in _files(Path(path))]
    # All files are read first, so that an invalid one is reported before any file is written.
    read = [(file, *_read(file)) for file in files]
    for file, text, encoding in read:
        moved, notes = migrated_config(text, str(file)) if _is_config(file) else migrated(text, str(file))
        if given.write and moved != text:
            with open(file, "w", encoding=encoding, newline="") as out:
                out.write(moved)
        print(_diff(text, moved, str(file)), end="", flush=True)
        for line in _report(str(file), moved != text, notes, given.write):
            print(line, file=sys.stderr)
    return 0


def _files(path: Path) -> list[Path]:
    found = [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*.py")) if not re.search(r"/(\.|site-packages/)", f"/{file}")]
    if not found:
        raise MisconfigurationException(f"there is no script (*.py) in the folder {path}")
    if not found[0].is_file():
        raise MisconfigurationException(f"{path} does not exist (in {Path.cwd()})")
    if path.suffix == ".ipynb":
        raise MisconfigurationException(
            f"{path} is a notebook. Convert it to a script first, with `jupyter nbconvert --to script`"
        )
    return found


def _is_config(file: Path) -> bool:
    return file.suffix in (".yaml", ".yml", ".json")


def _read(file: Path) -> tuple[str, str]:
    """Return (text of a file with unchanged line endings, encoding of the file).

    Raises:
        MisconfigurationException: the file is not valid Python, YAML or JSON.
    """
    data = file.read_bytes()
    if _is_config(file):
        try:
            text = data.decode()
            migrated_config(text, str(file))
        except ValueError as error:
            raise MisconfigurationException(f"{file} is not valid {file.suffix[1:]}: {error}") from None
        return text, "utf-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, message = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise MisconfigurationException(f"{file}:{line} is not valid Python 3: {message}") from None
    return text, encoding


def _lines(text: str) -> list[str]:
    """Split text into lines where Python's parser does; ``str.splitlines`` also splits at other characters."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name.lstrip('/')}", f"b/{name.lstrip('/')}")
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True, order=True)
class ReportLine:
    """An entry of the report: a change to make by hand, or a difference in behavior, at one line of the script."""

    line: int
    text: str
    by_hand: bool = True
    """True for a change to make by hand, False for a difference in behavior."""
    weight: int = 1
    """Severity: 0: the script fails there; 1: something is silently left out; 2: to check."""


def _report(name: str, changed: bool, notes: Sequence[ReportLine], written: bool) -> Iterator[str]:
    if not changed and not notes:
        yield f"{name}: nothing to do: the file does not use Lightning"
    elif not changed or written:
        yield f"{name}: {'written' if changed else 'no line has to change'}"
    differs = "differences for this script (docs/from-lightning.md has more)"
    by_weight = sorted(set(notes), key=lambda note: (note.weight, note))
    for by_hand, title in ((True, "to do by hand"), (False, differs)):
        lines = [f"  line {note.line}: {note.text}" for note in by_weight if note.by_hand is by_hand]
        yield from [f"{name}: {title}:", *lines] if lines else []


# -- a script --------------------------------------------------------------------------------------------------


DROPPED = "\0"
"""Placeholder for a removed argument; this character cannot occur in a Python file."""
CLEARED = re.compile(
    rf"(?m)^[ \t]*{DROPPED}[ \t]*,?[ \t]*(#.*)?(\r\n|\n)|{DROPPED}[ \t]*,[ \t]*|,[ \t]*{DROPPED}|{DROPPED}"
)
"""A removed argument: with its line and comment if it has its own line, else with a comma."""


def migrated(text: str, name: str = "script.py") -> tuple[str, list[ReportLine]]:
    """Change a script for Lightning so that it uses lockstep. Return (new text, report lines).

    Args:
        text: text of the script.
        name: name of the script's file, for errors.

    Raises:
        SyntaxError: the text is not valid Python.

    Example:
        >>> migrated("from lightning.pytorch import Trainer\\nTrainer(max_nb_epochs=1)\\n")[0]
        'from lockstep import Trainer\\nTrainer(max_epochs=1)\\n'
    """
    script = _Script(text, name)
    for node in script.nodes:
        if isinstance(node, ast.Import):
            script.import_(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            script.import_from(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            path = script.resolve(node.value.func)
            script.names |= {ast.unparse(target): path for target in node.targets if path.endswith(".Trainer")}
    if not script.names:
        return text, script.notes
    # By convention these names hold a Trainer, also where the script does not create it.
    script.names |= dict.fromkeys(("trainer", "self.trainer"), f"{ROOT}.Trainer")
    for node in script.nodes:
        if isinstance(node, ast.Call) and script.resolve(node.func).endswith(".Trainer"):
            _flags(script, node)
        elif isinstance(node, ast.Attribute):
            script.report_refused(node, ast.unparse(node), script.resolve(node) or ROOT)
        elif isinstance(node, ast.Constant) and lockstep_module(str(node.value)):
            script.notes.append(
                ReportLine(
                    node.lineno,
                    f"the text {node.value!r:.60} contains a name of Lightning. Check whether it must be changed.",
                    weight=2,
                )
            )
    return script.edited(), [*script.notes, *found_in(script)]


class _Script:
    """Editor of a script: its syntax tree, the edits to make, and the script's names for objects of lockstep."""

    def __init__(self, text: str, name: str) -> None:
        self.nodes = list(ast.walk(ast.parse(text, name)))
        self.names: dict[str, str] = {}  #: name in the script to path in lockstep, such as ``lockstep.Trainer``
        self.notes: list[ReportLine] = []
        self._data = text.encode()  # columns of the syntax tree count bytes
        self._starts = [0, *itertools.accumulate(len(line.encode()) for line in _lines(text))]
        self.edits: list[tuple[int, int, str]] = []  #: start, end, and new text

    def span(self, node: ast.expr | ast.keyword | ast.alias | ast.stmt) -> tuple[int, int]:
        """Return (start, end) of a node, as byte offsets in the script's text."""
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end

    def text_of(self, node: ast.expr | ast.keyword) -> str:
        """Return the text of a node."""
        return self._data[slice(*self.span(node))].decode()

    def edited(self) -> str:
        """Return the script's text after all edits."""
        data = self._data
        # From the end, so that earlier positions stay valid.
        for start, end, new in sorted(set(self.edits), reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return CLEARED.sub("", data.decode())

    def report_refused(self, node: ast.stmt | ast.expr, name: str, path: str) -> None:
        """Add a name that lockstep refuses to the report, with the reason for the refusal."""
        why = refusal(path)
        if why is not None and (isinstance(node, ast.stmt) or refusal(path.rpartition(".")[0]) is None):
            self.notes.append(ReportLine(node.lineno, f"{name}: {why}", weight=0))

    def import_(self, node: ast.Import) -> None:
        """Change ``import lightning.pytorch as pl`` to import lockstep under the same name.

        Without ``as``, that name is the package's, such as ``lightning``.
        """
        for alias in node.names:
            home = lockstep_module(alias.name)
            if home is not None:
                known = alias.asname or alias.name.partition(".")[0]
                self.names[known] = home if alias.asname else ROOT
                self.edits.append((*self.span(alias), f"{self.names[known]} as {known}"))
                self.report_refused(node, f"import {alias.name}", home)

    def import_from(self, node: ast.ImportFrom) -> None:
        """Change the module in ``from lightning.pytorch import Trainer`` to lockstep's, but not the names."""
        home = lockstep_module(str(node.module))
        found = re.compile(rb"from\s+([\w.]+)").match(self._data, self.span(node)[0])
        if home is None or found is None:
            return
        self.edits.append((*found.span(1), home))
        for alias in node.names:
            if alias.name == "*":
                names = [] if refusal(home) else getattr(import_module(home), "__all__", [])
                self.names.update({home: home, **{name: f"{home}.{name}" for name in names}})
            else:
                self.names[alias.asname or alias.name] = f"{home}.{alias.name}"
            self.report_refused(node, alias.name, f"{home}.{alias.name}".removesuffix(".*"))

    def resolve(self, node: ast.expr) -> str:
        """Return an expression's path in lockstep, such as ``lockstep.callbacks.Timer`` for ``pl.callbacks.Timer``.

        Return "" if it is unknown.
        """
        if not isinstance(node, ast.Attribute | ast.Name):
            return ""
        known = self.names.get(ast.unparse(node), "")
        if known or isinstance(node, ast.Name):
            return known
        base = self.resolve(node.value)
        return f"{base}.{node.attr}".replace(f"{ROOT}.pytorch", ROOT) if base else ""

    def kinds(self, node: ast.ClassDef) -> Iterator[str]:
        """Yield "LightningModule", "LightningDataModule" or "Callback" for each such base of a class."""
        for path in map(self.resolve, node.bases):
            kind = "Callback" if path.startswith(f"{ROOT}.callbacks.") else path.rpartition(".")[2]
            if kind in ("LightningModule", "LightningDataModule", "Callback"):
                self.names[node.name] = f"{ROOT}.{kind}"
                yield kind


# -- a config --------------------------------------------------------------------------------------------------


def migrated_config(text: str, name: str) -> tuple[str, list[ReportLine]]:
    """Change the class paths in a config of LightningCLI to lockstep's. Return (new text, report lines).

    Args:
        text: text of the config.
        name: name of the config's file. ``.json`` means JSON; any other, YAML.

    Raises:
        ValueError: the text is not valid.
    """
    notes, moved, end = [], "", 0
    for start, stop, value in _strings(text, name.endswith(".json")):
        home = lockstep_class_path(value)
        why = None if home is None else refusal(home)
        if why is not None:
            notes.append(ReportLine(len(_lines(text[:start] + "x")), f"{value}: {why}", weight=0))
        elif home is not None:
            moved, end = f"{moved}{text[end:start]}{text[start:stop].replace(value, home)}", stop
    return moved + text[end:], notes


def _strings(text: str, is_json: bool) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, value) for each string in a config.

    Raises:
        ValueError: the text is not valid.
    """
    if is_json:
        json.loads(text)  # raises for invalid text, which the pattern below would not notice
        for found in re.finditer(r'"((?:[^"\\]|\\.)*)"', text):
            yield (*found.span(1), found[1])
        return
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise missing_extra("yaml", "cli", "lockstep migrate FILE.yaml") from None
    try:
        for event in yaml.parse(text):
            if isinstance(event, yaml.ScalarEvent):
                yield event.start_mark.index, event.end_mark.index, event.value
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


# -- flags of the Trainer --------------------------------------------------------------------------------------


class _Unknown:
    """Placeholder for a value that is known only when the script runs; its ``repr`` is the value's code."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _flags(script: _Script, call: ast.Call) -> None:
    """Replace old Trainer flags in a call with today's. Report flags whose meaning depends on unknown values."""
    given = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
    if len(given) < len(call.keywords):
        script.notes.append(
            ReportLine(call.lineno, "Trainer(**...): old flags in it are translated when the script runs.", weight=2)
        )
    values: Today = {name: _value(script, keyword.value) for name, keyword in given.items()}
    today = {flag: values.get(flag, default) for flag, default in FLAGS.items()}
    old = old_flags_of(today, {name: value for name, value in values.items() if name in OLD_FLAGS})
    together = {name: value for name, value in old.items() if name in TOGETHER}
    if together:  # they and the accelerator determine together on which devices the run takes place
        names = [k for k in values if k in TOGETHER or (k == "accelerator" and today[k] is not values[k])]
        _translate(script, given, names, together, today)
    for name in old.keys() - TOGETHER:
        _translate(script, given, [name], {name: old[name]}, today)


def _value(script: _Script, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _Unknown(script.text_of(node))


def _meaning(old: Today, today: Today, others: Set[str]) -> tuple[Translation, str]:
    """Return (old flags translated to today's, text to report). The text is "" if the script can be edited.

    Args:
        old: values of the old flags.
        today: today's flags, given or by default.
        others: names of the call's other arguments.
    """
    report = "its meaning today depends on the value; a warning reports it when the script runs."
    found = Translation()
    read = (today[flag] for flag in ("accelerator", "devices", "num_nodes", "strategy") if old.keys() & TOGETHER)
    is_open = _has_unknown((*old.values(), *read))
    try:
        found = meaning(old, today, FLAGS, here=False)
        if found.callbacks or found.resume is not None:
            report = f"today {', '.join(found.spelled)}."
        elif found.flags.keys() & others:
            report = f"today {', '.join(found.spelled)}, but this flag is also set."
        elif not is_open or _has_unknown(found.flags.values()):
            report = ""
    except (TypeError, ValueError) as error:
        if not is_open or REMOVED in str(error):
            report = str(error).partition("): ")[2] or str(error)
    return found, report


def _has_unknown(values: Iterable[object]) -> bool:
    """Return True if any of the values is known only when the script runs."""
    return any(isinstance(value, _Unknown) for value in values)


def _translate(script: _Script, given: dict[str, ast.keyword], names: list[str], old: Today, today: Today) -> None:
    """Replace old flags, which must be interpreted together, with today's flags.

    Args:
        given: arguments of the call by name.
        names: names of the arguments to replace.
        old: values of the old flags.
        today: today's flags, given or by default.
    """
    places = [given[name] for name in names]
    found, report = _meaning(old, today, given.keys() - set(names))
    if report:
        what = f"Trainer({', '.join(map(script.text_of, places)):.90})"
        script.notes.append(ReportLine(places[0].lineno, f"{what}: {report}", weight=0))
        return
    script.notes += [ReportLine(places[0].lineno, f"{note}.", by_hand=False) for note in found.notes]
    text = ", ".join(f"{flag}={value!r}" for flag, value in found.flags.items() if value != today[flag])
    script.edits += [(*script.span(place), (place is places[0] and text) or DROPPED) for place in places]


# -- rows of the report ----------------------------------------------------------------------------------------


ROWS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("differences.json").read_text())
"""Changes to make by hand and differences, by what a script uses; tests/surface/table.py writes the file."""


def found_in(script: _Script) -> Iterator[ReportLine]:
    """Yield report lines for the flags and names in a script that need a change by hand or behave differently.

    A difference in behavior is reported once, at the line of the first use.
    """
    reported: set[str] = set()
    for line, used in sorted({*_used(script)}):
        yield from (ReportLine(line, text) for text in ROWS["by_hand"].get(used, ()))
        new = [text for text in ROWS["differs"].get(used, ()) if text not in reported]
        reported.update(new)
        yield from (ReportLine(line, text, by_hand=False) for text in new)


def _used(script: _Script) -> Iterator[tuple[int, str]]:
    """Yield (line, key) for each flag and name in a script, with keys ``flag Trainer(devices)``, ``name self.log``."""
    trainers = []
    for node in script.nodes:
        if isinstance(node, ast.Call):
            path = script.resolve(node.func)
            if path.endswith(".Trainer"):
                trainers.append(node.lineno)
            function = (path or ast.unparse(node.func)).rpartition(".")[2]
            for keyword in node.keywords:
                yield from ((node.lineno, f"flag {function}({used})") for used in _argument(keyword))
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            of = "trainer" if script.resolve(node.value).endswith(".Trainer") else owner
            yield from (
                (node.lineno, f"name {name}") for name in (node.attr, f"{of}.{node.attr}", script.resolve(node))
            )
        elif isinstance(node, ast.Assign):
            yield from ((node.lineno, f"name {ast.unparse(target)}=") for target in node.targets)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from ((each.lineno, f"name {kind}.{each.name}") for kind in script.kinds(node) for each in methods)
        elif isinstance(node, ast.Name | ast.arg):
            name = ast.unparse(node).partition(":")[0]
            yield node.lineno, f"name {script.names.get(name, name).rpartition('.')[2]}"
    yield from ((line, "several Trainers") for line in sorted(trainers)[1:])


def _argument(keyword: ast.keyword) -> Iterator[str]:
    node = keyword.value
    value = node.value if isinstance(node, ast.Constant) else type(node).__name__.lower()  # such as dict
    if value is True or value not in (1, None, "auto"):  # these mean one process, as without the flag
        yield str(keyword.arg)
    yield from (f"{keyword.arg}=", f"{keyword.arg}={value!s}")
