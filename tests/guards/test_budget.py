"""The package and the tools of its tests stay within their budget of tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tests.guards.budget import BUDGET, MOST, over, used


def test_each_folder_stays_within_its_budget_and_the_sum_is_not_raised() -> None:
    budget = json.loads(BUDGET.read_text())
    assert over(budget, used()) == [], "take code out, or move budget from another folder in tests/guards/budget.json"
    assert sum(budget.values()) <= MOST


def test_what_is_counted(tmp_path: Path) -> None:
    package, tools = tmp_path / "lockstep", tmp_path / "tools"
    for folder in (package / "loop", package / "engines" / "ddp", tools):
        folder.mkdir(parents=True)
    (package / "loop" / "a.py").write_text('"""No token."""\nx = 1  # none\n')
    (package / "engines" / "ddp" / "b.json").write_text('{"a": 1}')
    (tools / "c.py").write_text("x\n")
    found = used(package, tools)
    assert found == {"engines/ddp": 5, "loop": 3, "tests/tools": 1}
    assert over({"loop": 2, "engines/ddp": 5, "tests/tools": 1}, found) == ["loop has 3 tokens, and a budget of 2"]
