"""Audit, which verifies all scripts that a TOML file lists, and writes a page with their verdicts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, Certificate
from lockstep.extensions.verify.processes import Patience
from lockstep.extensions.verify.runs import Request, working_copy
from lockstep.extensions.verify.verification import verify
from lockstep.ground.errors import MisconfigurationException

NOT_INSTALLED = "not installed"
"""Verdict on a script whose modules cannot be imported."""


@dataclass(frozen=True)
class ListedScript:
    """Entry of the file: a script, and how it is verified.

    Attributes:
        script: path of the script, relative to the file.
        name: name of the entry in the page; "": the name of the script.
        package: distribution whose version the page shows.
        arguments: arguments of the script.
        devices: number of ranks.
        steps: optimizer steps that are compared.
        patch: pairs of texts; each first one is replaced by the second one in the script, for example to make it small.
        needs: top-level modules without which the script is not run.
        expected: expected verdict.
        known: what is known about the verdict; shown in the page.
        shows: short program that shows the difference; shown in the page. The file has its path.
    """

    script: str
    name: str = ""
    package: str = "torch"
    arguments: tuple[str, ...] = ()
    devices: int = 2
    steps: int = 5
    patch: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    expected: str = ALIKE
    known: str = ""
    shows: str = ""


@dataclass(frozen=True)
class ScriptVerdict:
    """Verdict on a listed script.

    Attributes:
        entry: the entry.
        release: version of its package; "" if it is not installed.
        certificate: its certificate, or None if it was not run.
    """

    entry: ListedScript
    release: str
    certificate: Certificate | None

    @property
    def verdict(self) -> str:
        """Verdict, or that the script's modules are not installed."""
        return NOT_INSTALLED if self.certificate is None else self.certificate.verdict

    @property
    def is_expected(self) -> bool:
        """True if the verdict is the expected one, or the script was not run."""
        return self.verdict in (self.entry.expected, NOT_INSTALLED)


def audit(path: Path, report: Path, silence: float) -> int:
    """Verify the scripts that a file lists, write the page, and return the exit code.

    Args:
        path: the TOML file.
        report: path of the page. It is rewritten after each script.
        silence: seconds without any event of a rank after which a run counts as stuck.

    Returns:
        0 if each verdict is the expected one, 1 if a script is unexpectedly different, and 2 for other unexpected
        verdicts.

    Raises:
        MisconfigurationException: the file is not valid.
    """
    results: list[ScriptVerdict] = []
    for entry in read(path):
        results.append(_run(entry, path.parent, Patience(silence, 10 * silence)))
        note = "" if results[-1].is_expected else f" (expected: {entry.expected})"
        print(f"{entry.name}: {results[-1].verdict}{note}", flush=True)
        report.write_text(page(results))
    unexpected = {result.verdict for result in results if not result.is_expected}
    return 1 if DIFFERENT in unexpected else 2 if unexpected else 0


def read(path: Path) -> list[ListedScript]:
    """Read the entries of a TOML file, each a table ``[[script]]``.

    Raises:
        MisconfigurationException: the file is not valid, or a script does not exist.
    """
    if sys.version_info < (3, 11):
        raise MisconfigurationException(f"{path}: Python 3.10 cannot read TOML files: use Python 3.11 or newer")
    try:
        tables = importlib.import_module("tomllib").loads(path.read_text()).get("script", [])
    except ValueError as error:
        raise MisconfigurationException(f"{path} is not a valid TOML file: {error}") from error
    if not tables:
        raise MisconfigurationException(f"{path} lists no script: add a table [[script]] with the field script")
    return [_entry(f"{path}, script {number}", table, path.parent) for number, table in enumerate(tables, 1)]


def _entry(where: str, table: dict[str, Any], folder: Path) -> ListedScript:
    """Create an entry from a table. ``where`` names the table in messages."""
    kinds = vars(ListedScript(""))
    found = {name: _plain(value) for name, value in table.items()}
    for name, value in found.items():
        if name not in kinds:
            raise MisconfigurationException(f"{where}: unknown field {name!r}: use one of {', '.join(kinds)}")
        if type(value) is not type(kinds[name]):
            kind = type(kinds[name]).__name__
            raise MisconfigurationException(f"{where}: {name} is {table[name]!r}: pass a value of type {kind}")
    for name in ("script", "shows"):
        if not (folder / found.get(name, "")).is_file() and (name == "script" or name in found):
            raise MisconfigurationException(
                f"{where}: {name} {found.get(name, '')!r} is not a file in the folder of the list: correct the path"
            )
    text = (folder / found["script"]).read_text()
    for pair in found.get("patch", ()):
        if len(pair) != 2 or pair[0] not in text:
            raise MisconfigurationException(f"{where}: patch {pair}: pass pairs of a text in the script and a new text")
    if found.get("shows"):
        found["shows"] = (folder / found["shows"]).read_text().strip()
    entry = ListedScript(**found)
    return entry if entry.name else replace(entry, name=entry.script)


def _plain(value: Any) -> Any:
    """Convert lists to tuples."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _run(entry: ListedScript, folder: Path, patience: Patience) -> ScriptVerdict:
    """Verify an entry's script in a copy of the folder."""
    try:
        release = version(entry.package)
    except PackageNotFoundError:
        release = ""
    if not all(map(importlib.util.find_spec, entry.needs)):
        return ScriptVerdict(entry, release, None)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as temporary:
        copy = working_copy(folder, Path(temporary) / "work")
        script = copy / entry.script
        text = script.read_text()
        for old, new in entry.patch:
            text = text.replace(old, new)
        script.write_text(text)
        os.chdir(copy)
        try:
            words = (entry.script, *entry.arguments)
            certificate = verify(Request(words, entry.devices, entry.steps, patience=patience))
        finally:
            os.chdir(before)
    return ScriptVerdict(entry, release, certificate)


# -- the page


def page(results: Sequence[ScriptVerdict]) -> str:
    """Return the page as Markdown: a table of all results, and details on those that differ or have no verdict."""
    counts = Counter(result.verdict for result in results)
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    lines = [
        "# Audit of scripts",
        "",
        "`lockstep verify` ran each script on ranks, and in one process with the same samples, and compared both step "
        "by step. What is known about a verdict is below the table.",
        "",
        f"{len(results)} scripts: {summary}.",
        "",
        "| package | version | script | verdict | first difference | cause | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        entry, found = result.entry, result.certificate
        cells = [entry.package, result.release, entry.name, result.verdict]
        if found is not None:
            cells += [found.first_difference, found.cause or " ".join(found.reasons), f"{found.seconds:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    for result in results:
        if result.verdict != ALIKE or result.entry.known:
            lines += ["", *_details(result)]
    return "\n".join([*lines, ""])


def _details(result: ScriptVerdict) -> list[str]:
    """Return the lines about one result."""
    entry, found = result.entry, result.certificate
    lines = [f"## {entry.name}: {result.verdict}", ""]
    if found is None:
        lines += [f"The script needs {', '.join(entry.needs)}.", ""]
    elif found.first_difference:
        lines += [f"- first difference: {found.first_difference}", f"- cause: {found.cause or 'not found'}", ""]
    elif found.reasons:
        lines += [f"- {reason}" for reason in found.reasons] + [""]
    lines += [entry.known.strip(), ""] if entry.known else []
    if entry.shows:
        lines += ["```python", entry.shows, "```", ""]
    return lines[:-1]
