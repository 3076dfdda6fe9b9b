"""The tests of the suite that are marked gpu: how many pass, and the last line of each that fails."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.plan import ROOT

MARK = re.compile(r"mark\.gpu\b")


def run(part: Part) -> None:
    """A check for each file, from one run of pytest."""
    part.check("pytest and the other packages of the tests are installed", needed)
    report = Path("tests.xml").resolve()
    part.check("all tests in one run", tested, part, report)
    for file, (passed, failed, skipped, said) in by_file(report).items():
        part.check(file, told, passed, failed, skipped, said)


def needed() -> Numbers:
    """What the tests' own files import beside torch and lockstep."""
    missing = [
        name for name in ("pytest", "pytest_timeout", "hypothesis", "cloudpickle", "numpy") if find_spec(name) is None
    ]
    if missing:
        raise Skip(f"not installed: {', '.join(missing)}")
    return {}


def marked() -> list[str]:
    """The files that have such tests: no other is read, since others need more packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if MARK.search(file.read_text())]


def tested(part: Part, report: Path) -> Numbers:
    """One run of pytest; on a CPU it collects the tests and skips them."""
    files = marked()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    limit = max(5.0, part.left - 3)
    try:
        done = subprocess.run([*command, "--timeout=60", *files], cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pytest took longer than {limit:.0f} s") from None
    expect(done.returncode in (0, 1), f"pytest ended with status {done.returncode}: gpu.log has its output")
    return {"files": len(files)}


def by_file(report: Path) -> dict[str, tuple[int, int, int, list[str]]]:
    """By file: how many passed, failed and were skipped, and what the failures say."""
    found: dict[str, tuple[int, int, int, list[str]]] = {}
    if not report.exists():
        return found
    for case in ElementTree.parse(report).iter("testcase"):
        file = (case.get("classname") or "").replace(".", "/")
        passed, failed, skipped, said = found.get(file, (0, 0, 0, []))
        wrong = [each for each in case if each.tag in ("failure", "error")]
        left_out = any(each.tag == "skipped" for each in case)
        said = said + [f"{case.get('name')}: {last_line(each)}" for each in wrong]
        found[file] = (passed + (not wrong and not left_out), failed + bool(wrong), skipped + left_out, said)
    return found


def last_line(failure: ElementTree.Element) -> str:
    """What a failure says, in short."""
    text = (failure.get("message") or failure.text or "").strip()
    return text.splitlines()[0][:200] if text else "no word"


def told(passed: int, failed: int, skipped: int, said: list[str]) -> Numbers:
    """The verdict on a file."""
    numbers = {"passed": passed, "failed": failed, "skipped": skipped}
    if not passed and not failed:
        raise Skip(f"{skipped} skipped")
    expect(not failed, "; ".join(said), numbers)
    return numbers
