"""The form of `certificate.json`: whoever changes a field has to change the schema's number, the page and this file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lockstep
from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row, write

ROOT = Path(__file__).parents[3]
REPORT = {"schema": int, "lockstep": str, "certificates": list}
CERTIFICATE = {
    "script": str,
    "compared": str,
    "devices": int,
    "steps": int,
    "verdict": str,
    "precision": str,
    "rows": list,
    "first_difference": str,
    "cause": str,
    "evidence": str,
    "reasons": list,
    "notes": list,
    "gradient_differences": list,
    "seconds": float,
}
ROW = {"what": str, "number": str, "outcome": str}


def types(values: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in values.items()}


def test_fields_and_their_types_are_those_of_schema_1(tmp_path: Path) -> None:
    rows = (Row("gradients", "20", "equal"),)
    sizes = (0.5, math.nan)
    made = Certificate("train.py", 2, 5, DIFFERENT, rows=rows, reasons=("a",), notes=("b",), gradient_differences=sizes)
    write([made], tmp_path)
    text = (tmp_path / "certificate.json").read_text()
    report = json.loads(text, parse_constant=lambda name: f"not JSON: {name}")
    assert types(report) == REPORT
    assert (report["schema"], report["lockstep"]) == (1, lockstep.__version__)
    (found,) = report["certificates"]
    assert types(found) == CERTIFICATE
    assert types(found["rows"][0]) == ROW
    assert found["reasons"] == ["a"]
    assert found["notes"] == ["b"]
    assert found["gradient_differences"] == [0.5, None]
    assert (ALIKE, DIFFERENT, UNKNOWN) == ("alike", "different", "could not tell")


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs/verify.md").read_text()
    table = page.partition("## Certificates as JSON")[2].partition("\n## ")[0]
    names = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(names) == sorted([*REPORT, *CERTIFICATE])
