"""The certificate: whether N ranks train what one process trains, and if not, what differs first and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap

ALIKE, DIFFERENT, UNKNOWN = "alike", "different", "could not tell"
_WIDTH = 140
"""Letters in a line of the picture."""
EXIT_CODES = {ALIKE: 0, DIFFERENT: 1, UNKNOWN: 2}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: was compared.
        number: how much of it.
        outcome: "alike", with how exactly, or what differs first.
    """

    what: str
    number: str
    outcome: str


@dataclass(frozen=True)
class Certificate:
    """What `lockstep verify` found for one number of ranks; true where all is alike.

    Attributes:
        script: with its arguments.
        devices: ranks.
        steps: optimizer steps that were compared.
        verdict: "alike", "different" or "could not tell".
        precision: "float64", or "own": that of the script, compared against the spread of rounding.
        rows: what was compared.
        first: what differs first; "" where nothing does.
        cause: why, with the line of the script; "" where it was not found.
        proof: what makes that certain.
        reasons: why it could not be told.
        nature: what differs between ranks and one process by nature, and was left out.
        course: by step, the largest difference of gradients, as part of the largest gradient.
        seconds: that it took.
        compared: what was: the ranks with one process, with ranks that were stopped, or with each other.
    """

    script: str
    devices: int
    steps: int
    verdict: str
    precision: str = "float64"
    rows: tuple[Row, ...] = ()
    first: str = ""
    cause: str = ""
    proof: str = ""
    reasons: tuple[str, ...] = ()
    nature: tuple[str, ...] = ()
    course: tuple[float, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    compared: str = "ranks and one process"

    def __bool__(self) -> bool:
        return self.verdict == ALIKE

    @property
    def exit_code(self) -> int:
        """0 alike, 1 different, 2 could not tell."""
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        title = f"{self.script}: {self.devices} {self.compared}, {self.steps} steps, {self._numbers()}"
        width = max((len(row.what) for row in self.rows), default=0)
        numbers = max((len(row.number) for row in self.rows), default=0)
        lines = [title, *(f"  {row.what:<{width}}  {row.number:>{numbers}}  {row.outcome}" for row in self.rows)]
        return "\n".join([*lines, *self._findings()])

    def _numbers(self) -> str:
        return "in float64" if self.precision == "float64" else "in the script's own precision"

    def _findings(self) -> list[str]:
        lines = [f"  by nature: {note}" for note in self.nature]
        lines.append(f"verdict: {self.verdict}")
        lines += [f"because: {reason}" for reason in self.reasons]
        if self.first:
            lines.append(f"first difference: {self.first}")
            lines.append(f"cause: {self.cause or 'not found'}")
        if self.proof:
            lines.append(f"seen by: {self.proof}")
        return lines

    def markdown(self) -> str:
        """The certificate as a page."""
        title = f"# `{self.script}`: {self.devices} {self.compared}: {self.verdict}"
        rows = [f"| {row.what} | {row.number} | {row.outcome} |" for row in self.rows]
        table = ["| compared | number | outcome |", "|---|---|---|", *rows, ""] if rows else []
        findings = [f"- {line.strip()}" for line in self._findings()]
        about = f"{self.steps} optimizer steps, {self._numbers()}, in {self.seconds:.0f} s."
        return "\n".join([title, "", about, "", *table, *findings, ""])


def write(certificates: Sequence[Certificate], folder: Path) -> list[Path]:
    """Write ``certificate.json``, ``certificate.md``, and a picture where something differs and matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "certificate.json", folder / "certificate.md"
    data.write_text(json.dumps([asdict(each) for each in certificates], indent=2) + "\n")
    page.write_text("\n".join(each.markdown() for each in certificates))
    picture = _picture(certificates, folder / "certificate.png")
    return [data, page, *([picture] if picture is not None else [])]


def _picture(certificates: Sequence[Certificate], path: Path) -> Path | None:
    """What differs, in words and over steps; None where nothing does or matplotlib is not installed."""
    told = [each for each in certificates if each.verdict == DIFFERENT and any(each.course)]
    if not told:
        return None
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    lines = [part for line in str(told[0]).splitlines() for part in wrap(line, _WIDTH, subsequent_indent="    ")]
    height = 0.16 * len(lines) + 2.8  # inches: a line of words, and the axes
    figure = Figure(figsize=(10, height))
    figure.text(0.02, 1 - 0.15 / height, "\n".join(lines), family="monospace", fontsize=8, va="top", linespacing=1.3)
    axes = figure.add_axes((0.11, 0.5 / height, 0.86, 2.0 / height))
    for each in told:
        axes.plot([max(size, 1e-17) for size in each.course], "o-", label=f"{each.devices} ranks")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("difference of gradients\n(part of the largest)")
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
