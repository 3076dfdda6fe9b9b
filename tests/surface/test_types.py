"""The types that a user's script sees: of the Trainer, of what it returns, of a module's and a callback's arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("typed_script.py")


def test_a_type_checker_follows_a_users_script() -> None:
    # the project's own settings, so that a check of the project has filled the cache
    command = [sys.executable, "-m", "mypy", "--config-file", str(PROJECT / "pyproject.toml"), str(SCRIPT)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    said = dict(re.findall(r"typed_script\.py:(\d+): (?:note: Revealed type is )?(.+)", ended.stdout))
    assert said, ended.stdout + ended.stderr
    expected = {}
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if "reveal_type(" in line or "# error:" in line:
            expected[str(number)] = line.rpartition("  # ")[2]
    assert said.keys() >= expected.keys(), ended.stdout
    for number, wanted in expected.items():
        found = said.pop(number).strip('"')
        assert found.startswith(wanted.removesuffix("...")), f"{SCRIPT.name}:{number}: {found}"
    assert not {text for text in said.values() if text.startswith("error")}, ended.stdout
