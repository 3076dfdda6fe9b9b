"""The table of Lightning 2.6's public surface: what works here, what differs, what is refused, and the test of each.

``rows/*.json`` and ``behaviour.json`` hold the rows; ``python -m tests.surface.table`` writes docs/lightning.md and the
list on docs/from-lightning.md from them.
"""

from __future__ import annotations

import ast
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.differential import known
from tests.surface import applies, matrix

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "lightning.md"
GUIDE = ROOT / "docs" / "from-lightning.md"
MARK = "<!-- written by python -m tests.surface.table -->"
"""Stands before and after the list of common differences on `GUIDE`."""

KINDS = {
    "flag": "Flags of Trainer",
    "flag of 2019": "Flags of 2019 and of the years after",
    "accelerator": "Accelerators",
    "registry": "Names of strategies",
    "strategy argument": "Arguments of DDPStrategy",
    "attribute": "Public attributes and methods of Trainer",
    "hook": "Hooks of LightningModule and LightningDataModule",
    "callback hook": "Hooks of Callback",
    "module attribute": "Public attributes and methods of LightningModule",
    "datamodule attribute": "Public attributes and methods of LightningDataModule",
    "callback": "Callbacks",
    "logger": "Loggers and hyperparameters",
    "profiler": "Profilers",
    "tuner": "Tuner",
    "cli": "LightningCLI",
    "name": "Names that can be imported",
}
VERDICTS = ("works", "differs", "refused")


def rows() -> list[dict[str, Any]]:
    """All rows: kind, name, verdict, reason (of what differs or is refused) and test, by kind and name."""
    found = [row for file in sorted((FOLDER / "rows").glob("*.json")) for row in json.loads(file.read_text())]
    return sorted(found, key=lambda row: (list(KINDS).index(row["kind"]), row["name"].lower(), row["name"]))


def is_test(name: str) -> bool:
    """Whether ``tests/file.py::test_name`` or ``tests/file.py::Class::test_name`` is in the file."""
    file, *path = name.split("::")
    names = _tests(file)
    return bool(path) and "::".join(part.partition("[")[0] for part in path) in names


@lru_cache
def _tests(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return frozenset(found)


def page() -> str:
    """The page as Markdown."""
    everything = rows()
    counts = {verdict: sum(row["verdict"] == verdict for row in everything) for verdict in VERDICTS}
    lines = [
        "# Lightning 2.6 in lockstep",
        "",
        "This page is a reference for people who use Lightning 2.6.6. It lists every public name of Lightning,",
        "and whether the name works, differs or is refused in lockstep. [Coming from",
        "Lightning](from-lightning.md) lists the most frequent differences, and [where it has",
        "run](../README.md#where-it-has-run) the devices.",
        "",
        "The last column of a table names the test of the row. A rank is one process of a run, and a window is the",
        "micro-batches of one optimizer step. The page is written by `python -m tests.surface.table`.",
        "",
        f"In the tables, {counts['works']} names work, {counts['differs']} differ and {counts['refused']} are refused.",
    ]
    lines += [
        "",
        "## Support matrix",
        "",
        "This is Lightning's support matrix of 2019. `tests/config/test_support_matrix.py` runs each row, on CPU",
        "devices instead of GPUs, and in bf16 instead of 16 bit. The last row is new: in 2019, dp did not support",
        "16 bit.",
        "",
        *matrix.lines(),
    ]
    for kind, title in KINDS.items():
        of_kind = [row for row in everything if row["kind"] == kind]
        if of_kind:
            lines += [
                "",
                f"## {title}",
                "",
                "| name | verdict | what differs, or why not | test |",
                "|---|---|---|---|",
            ]
            lines += [_line(row) for row in of_kind]
    lines += [
        "",
        "## Rarer differences",
        "",
        *behaviour("others"),
        "",
        "## Found by random programs",
        "",
        "Differences that `python -m tests.differential` found by running random programs on lockstep and Lightning.",
        "",
        *(f"- {row.sentence}" for row in known.ROWS if row.where == known.PAGE),
    ]
    return "\n".join(lines) + "\n"


def behaviour(part: str) -> list[str]:
    """Return the list of what behaves otherwise than in Lightning: the "common" part, or the "others"."""
    lines = []
    for entry in applies.BEHAVIOUR[part]:
        there = f" *Lightning:* {entry['lightning']}." if entry["lightning"] else ""
        lines.append(f"- **{entry['what']}**: {entry['here']}{there}")
    return lines


def guide() -> str:
    """Return the page for people who come from Lightning, with today's list of common differences."""
    before, rest = GUIDE.read_text().split(f"{MARK}\n", 1)
    _, after = rest.split(f"{MARK}\n", 1)
    return "\n".join([f"{before}{MARK}", *behaviour("common"), f"{MARK}\n{after}"])


def _line(row: dict[str, Any]) -> str:
    reason = " ".join((row.get("reason") or "as in Lightning").split()).replace("|", "\\|")
    test = row["test"].removeprefix("tests/")
    return f"| `{row['name']}` | {row['verdict']} | {reason} | `{test}` |"


def main() -> None:
    """Write both pages, and what `lockstep migrate` reports of them."""
    PAGE.write_text(page())
    GUIDE.write_text(guide())
    applies.FILE.write_text(applies.text(rows()))


if __name__ == "__main__":
    main()
