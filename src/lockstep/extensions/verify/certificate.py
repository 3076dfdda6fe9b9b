"""Certificate of a verification: verdict, first difference and its cause, as text, JSON and Markdown."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ALIKE, DIFFERENT, UNKNOWN = "alike", "different", "could not tell"
SCHEMA = 1
"""Version of the form of ``certificate.json``. A field that is removed, renamed or changed in meaning increases it."""


@dataclass(frozen=True)
class Row:
    """Row of the certificate's table: one comparison and its outcome.

    Attributes:
        what: what was compared.
        number: number of compared items, with a unit.
        outcome: how closely the runs agree, or the first difference.
    """

    what: str
    number: str
    outcome: str


@dataclass(frozen=True)
class Certificate:
    """Result of `lockstep verify` for one number of ranks. ``bool(certificate)`` is True if the runs agree.

    Attributes:
        script: the script with its arguments.
        devices: number of ranks.
        steps: optimizer steps that were compared.
        verdict: "alike", "different" or "could not tell".
        precision: "float64", or "own" for the script's own precision, compared with the spread of rounding.
        rows: what was compared.
        first_difference: the first difference; "" if there is none.
        cause: the cause, with the line of the script; "" if it was not found.
        evidence: the evidence for the cause.
        reasons: why there is no verdict.
        notes: expected differences between ranks and one process, which do not affect the verdict.
        gradient_differences: for each step the largest difference of gradients, as a fraction of the largest gradient.
        seconds: duration of the check, in seconds.
        compared: what the ranks were compared with: one process, ranks that were stopped, or each other.
    """

    script: str
    devices: int
    steps: int
    verdict: str
    precision: str = "float64"
    rows: tuple[Row, ...] = ()
    first_difference: str = ""
    cause: str = ""
    evidence: str = ""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gradient_differences: tuple[float, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    compared: str = "ranks and one process"

    def __bool__(self) -> bool:
        return self.verdict == ALIKE

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if the runs agree, 1 if they differ, 2 if this could not be determined."""
        return (ALIKE, DIFFERENT, UNKNOWN).index(self.verdict)

    def __str__(self) -> str:
        precision = "in float64" if self.precision == "float64" else "in the script's own precision"
        width = max((len(row.what) for row in self.rows), default=0)
        numbers = max((len(row.number) for row in self.rows), default=0)
        lines = [f"{self.script}: {self.devices} {self.compared}, {self.steps} steps, {precision}"]
        lines += [f"  {row.what:<{width}}  {row.number:>{numbers}}  {row.outcome}" for row in self.rows]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(f"verdict: {self.verdict}")
        lines += [f"reason: {reason}" for reason in self.reasons]
        if self.first_difference:
            lines.append(f"first difference: {self.first_difference}")
            lines.append(f"cause: {self.cause or 'not found'}")
        if self.evidence:
            lines.append(f"evidence: {self.evidence}")
        return "\n".join(lines)


def write(certificates: Sequence[Certificate], folder: Path) -> list[Path]:
    """Write ``certificate.json`` and ``certificate.md``.

    Returns:
        The paths of the written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "certificate.json", folder / "certificate.md"
    found = [asdict(each) for each in certificates]
    for fields in found:
        # JSON has no NaN and no infinity
        fields["gradient_differences"] = [x if math.isfinite(x) else None for x in fields["gradient_differences"]]
    version = sys.modules["lockstep"].__version__
    data.write_text(json.dumps({"schema": SCHEMA, "lockstep": version, "certificates": found}, indent=2) + "\n")
    page.write_text("\n".join(f"# {each.verdict}\n\n```text\n{each}\n```\n" for each in certificates))
    return [data, page]
