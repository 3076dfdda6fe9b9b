"""The types that a user's script sees: of the Trainer, of what it returns, of a module's and a callback's arguments."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # where others keep the processors busy and no cache is there

PROJECT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SCRIPT, MISTAKES, CORRECT = (HERE / f"typed_{name}.py" for name in ("script", "mistakes", "correct"))


def mypy(*words: str) -> str:
    command = [sys.executable, "-m", "mypy", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False).stdout


def marked(mark: str = "# mistake") -> list[int]:
    """The lines with a mistake."""
    return [number for number, line in enumerate(MISTAKES.read_text().splitlines(), 1) if mark in line]


def errors(said: str, script: Path) -> list[int]:
    """The lines of mypy's errors in a script."""
    return [int(line) for line in re.findall(rf"{script.name}:(\d+): error:", said)]


@pytest.fixture(scope="module")
def said() -> str:
    # the project's own settings, so that a check of the project has filled the cache
    return mypy("--config-file", str(PROJECT / "pyproject.toml"), str(SCRIPT), str(MISTAKES), str(CORRECT))


def test_a_type_checker_follows_a_users_script(said: str) -> None:
    found = dict(re.findall(r"typed_script\.py:(\d+): (?:note: Revealed type is )?(.+)", said))
    assert found, said
    expected = {}
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if "reveal_type(" in line or "# error:" in line:
            expected[str(number)] = line.rpartition("  # ")[2]
    assert found.keys() >= expected.keys(), said
    for number, wanted in expected.items():
        text = found.pop(number).strip('"')
        assert text.startswith(wanted.removesuffix("...")), f"{SCRIPT.name}:{number}: {text}"
    assert not {text for text in found.values() if text.startswith("error")}, said


def test_mypy_finds_every_mistake_and_nothing_else(said: str) -> None:
    """A misspelt flag or attribute passed, since the Trainer took any."""
    assert len(marked()) == 10
    # the project's own settings leave torchmetrics out, so that a metric may be anything
    assert errors(said, MISTAKES) == [line for line in marked() if line not in marked("# mistake: with torchmetrics")]
    assert errors(said, CORRECT) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_finds_every_mistake_by_a_users_settings(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    (tmp_path / "mypy.ini").write_text("[mypy]\nwarn_unused_ignores = True\n")
    settings = ("--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache"))
    said = mypy(*settings, str(MISTAKES), str(CORRECT))
    assert errors(said, MISTAKES) == marked(), said
    assert errors(said, CORRECT) == [], said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_every_mistake_and_nothing_else() -> None:
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, str(MISTAKES), str(CORRECT)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    told = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found if each["severity"] == "error"
    ]
    assert sorted(told) == [(MISTAKES.name, line) for line in marked()], ended.stdout
