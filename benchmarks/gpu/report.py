"""What becomes of the findings of `scripts/gpu`: a verdict for each part, tables, a page and rows of the README."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, ROOT, PartPlan

FORMAT = 1
TIME = "%Y-%m-%d %H:%M UTC"
PAGE = ROOT / "docs" / "gpu.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
"""Between these lines of the page is what the script writes."""

Found = dict[str, Any]

# -- verdicts ------------------------------------------------------------------------------------------------


def part_result(checks: list[Found], status: int | None, limit: float, seconds: float) -> Found:
    """The verdict on a part: failed where a check failed, or the process did not end well and in time."""
    results = {check["result"] for check in checks}
    said = ""
    if status is None or (status and seconds >= limit):
        said = f"ended at its limit of {limit:.0f} s; gpu.log has the stacks"
    elif status:
        said = f"its process ended with status {status}; gpu.log says why"
    elif not checks:
        said = "its process made no check"
    verdict = "failed" if said or "failed" in results else "skipped" if results == {"skipped"} else "passed"
    return {"result": verdict, "said": said, "seconds": round(seconds, 1), "checks": checks}


def not_begun(part: PartPlan) -> Found:
    """The verdict on a part for which no time was left."""
    return {"result": "failed", "said": f"not begun: no time was left of --seconds ({part.title})", "checks": []}


def earlier_parts(out: Path, found: Found) -> dict[str, Found]:
    """The parts of an earlier run, each with a word on when it was and of which sources.

    Args:
        out: the folder that has its gpu.json, or none.
        found: of the run that begins.

    Raises:
        ValueError: the earlier run was on another device, or had another torch.
    """
    file = out / "gpu.json"
    if not file.exists():
        return {}
    before = json.loads(file.read_text())
    for name in ("device", "devices", "packages", "small"):
        if before[name] != found[name]:
            raise ValueError(f"--add: {file} is of a run with {name} {before[name]}, and this one has {found[name]}")
    run = f"{before['began']}, sources {before['sources']}"
    return {name: {"run": run, **part} for name, part in before["parts"].items()}


def failed(found: Found) -> int:
    """How many parts failed."""
    return sum(part["result"] == "failed" for part in found["parts"].values())


def last_line(found: Found) -> str:
    """``GPU: n parts passed, m failed``."""
    passed = sum(part["result"] == "passed" for part in found["parts"].values())
    return f"GPU: {passed} parts passed, {failed(found)} failed"


def line_of(part: PartPlan, told: Found) -> str:
    """A part in one line, and a line for each check that failed or was left out."""
    checks = told["checks"]
    good = sum(check["result"] == "passed" for check in checks)
    lines = [f"{part.name}: {told['result']}, {good} of {len(checks)} checks in {told.get('seconds', 0):.0f} s"]
    lines += [f"  {told['said']}"] if told["said"] else []
    lines += [f"  {one['name']}: {one['result']}: {one['said']}" for one in checks if one["result"] != "passed"]
    return "\n".join(lines)


# -- tables --------------------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def tables(found: Found) -> str:
    """All findings as Markdown: where, the parts, then the checks of each."""
    pieces = [where(found), overview(found)]
    for part in PARTS:
        told = found["parts"].get(part.name)
        if told is not None and told["checks"]:
            pieces += [f"### {part.name}: {part.title}", details(part, told)]
    return "\n\n".join(pieces) + "\n"


def where(found: Found) -> str:
    """The run in one paragraph."""
    known = [f"{name} {version}" for name, version in {**found["packages"], **found["libraries"]}.items()]
    trial = "**A trial of the script on a CPU with small models, not a measurement of a device.** "
    text = trial if found["kind"] == "cpu" else ""
    text += f"{found['device']}{several(found)}, {found['began']}, "
    text += f"`{found['command']}`, commit {found['commit'] or 'not known'} (sources {found['sources']}), "
    return text + f"{found['system']}, Python {found['python']}, {', '.join(known)}."


def overview(found: Found) -> str:
    """A row for each part."""
    rows = []
    for part in PARTS:
        told = found["parts"].get(part.name)
        if told is not None:
            counts = [
                sum(check["result"] == word for check in told["checks"]) for word in ("passed", "failed", "skipped")
            ]
            run = told.get("run", "as above")
            rows.append([part.name, told["result"], *counts, told.get("seconds"), run])
    several_runs = any("run" in told for told in found["parts"].values())
    head = ["part", "verdict", "passed", "failed", "skipped", "seconds", *(["run"] if several_runs else [])]
    return table(head, (row[: len(head)] for row in rows))


def details(part: PartPlan, told: Found) -> str:
    """The checks of a part: figures in columns where most checks share them, else in words."""
    checks = told["checks"]
    names = list(dict.fromkeys(name for check in checks for name in check.get("numbers", {})))
    if names and part.name in ("speed", "large"):
        return speed(checks)
    rows = [[check["name"], check["result"], _words(check)] for check in checks]
    return table(["check", "verdict", "measured"], rows)


def _words(check: Found) -> str:
    numbers = [f"{name} {_cell(value)}" for name, value in check.get("numbers", {}).items()]
    return "; ".join([*([check["said"]] if check.get("said") else []), *numbers])


COLUMNS = ("ms a step", "over the loop", "units/s", "MFU", "peak MiB", "waits a step")


def speed(checks: list[Found]) -> str:
    """A table for each model: a row for each way to train it."""
    pieces = []
    for check in checks:
        ways = check.get("numbers", {}).get("ways", {})
        pieces.append(f"{check['name']}: {check['result']}{'. ' + check['said'] if check.get('said') else ''}")
        if ways:
            unit = check["numbers"].get("unit", "units")
            head = ["method", *(column.replace("units", unit) for column in COLUMNS)]
            pieces.append(table(head, ([way, *(row.get(column) for column in COLUMNS)] for way, row in ways.items())))
        more = {name: value for name, value in check.get("numbers", {}).items() if name not in ("ways", "unit")}
        if more:
            pieces.append("; ".join(f"{name} {_cell(value)}" for name, value in more.items()))
    return "\n\n".join(pieces)


# -- the page and the README ---------------------------------------------------------------------------------


def write_tables(out: Path, commit: str) -> int:
    """Put the tables of a run into docs/gpu.md, and its rows into the README; returns the exit status.

    A run on a CPU replaces the page's section of the CPU alone, without its checks, and one on a device that of its
    device.

    Args:
        out: the folder that has gpu.json.
        commit: of the checkout that ran, where it had no git.
    """
    file = out / "gpu.json"
    if not file.exists():
        print(f"--write-tables: {file} is not there; run `scripts/gpu --out {out}` first", file=sys.stderr)
        return 2
    found = json.loads(file.read_text())
    found["commit"] = commit or found["commit"]
    if found["kind"] != "cpu" and not found["commit"]:
        print("--write-tables: that checkout had no git; give --commit, which the README's rows name", file=sys.stderr)
        return 2
    PAGE.write_text(with_section(PAGE.read_text(), found))
    README.write_text(with_rows(README.read_text(), rows_of(found)))
    print(f"{PAGE.relative_to(ROOT)} and {README.relative_to(ROOT)} have the run of {found['began']}")
    if rows_of(found):
        print(f'Put "{found["kind"]}" into RAN of src/lockstep/ground/torch_support.py, which goes with the table.')
    return 0


def with_section(page: str, found: Found) -> str:
    """The page with this run's tables, in the place of an earlier run's on the same device."""
    before, begin, rest = page.partition(BEGIN + "\n")
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    sections = {}
    for piece in inside.split("\n## ")[1:]:
        title, _, text = piece.partition("\n")
        sections[title] = text.strip()
    short = found["kind"] == "cpu"  # a trial of the script: its checks are in gpu.md
    sections[title_of(found)] = f"{where(found)}\n\n{overview(found)}" if short else tables(found).strip()
    devices_first = sorted(sections, key=lambda title: (title.startswith("CPU"), title))
    body = "\n\n".join(f"## {title}\n\n{sections[title]}" for title in devices_first)
    return f"{before}{begin}\n{body}\n\n{end}{after}"


def title_of(found: Found) -> str:
    """The heading of a run's section."""
    if found["kind"] == "cpu":
        return "CPU: a trial of the script"
    return found["device"] + several(found)


def several(found: Found) -> str:
    """`` x 8`` where there are 8 devices."""
    return f" x {found['devices']}" if found["devices"] > 1 else ""


def rows_of(found: Found) -> dict[str, str]:
    """Rows of the README's table "Where it has run": the kind of device -> when, versions and commit."""
    if found["kind"] == "cpu":
        return {}
    passed = {name for name, part in found["parts"].items() if part["result"] == "passed"}
    packages = found["packages"]
    told = f"{found['began'][:10]}, {found['device']}, torch {packages.get('torch')}"
    nccl = found["libraries"].get("NCCL")
    commit = f", commit {found['commit'] or 'not known'}, `scripts/gpu`: [numbers](docs/gpu.md)"
    rows = {}
    kind = "GPU" if found["kind"] == "cuda" else found["kind"].upper()
    if passed & {"fits", "waits", "speed"}:
        rows[f"one {kind}"] = told + commit
    if "one_card" in passed:
        rows[f"several processes on one {kind}"] = told + commit
    if "several" in passed:
        rows[f"NCCL on several {kind}s"] = f"{found['devices']} x {told}, NCCL {nccl}{commit}"
    return rows


def with_rows(readme: str, rows: dict[str, str]) -> str:
    """The README with these rows in its table, each in the place of the row whose first cell begins alike."""
    lines = readme.splitlines()
    for name, told in rows.items():
        key = name.lower()
        for number, line in enumerate(lines):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and len(cells) == 2 and cells[0].lower().startswith(key):
                lines[number] = f"| {cells[0]} | {told} |"
                break
    return "\n".join(lines) + "\n"
