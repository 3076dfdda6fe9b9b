"""The order in which hooks are called, and what they can see then, is that of Lightning 2.6.6."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.golden.recorder import SCENARIOS, record

GOLDEN = Path(__file__).parent / "hook_order"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_hooks_come_in_lightnings_order(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())["calls"]
    called = record("lockstep", SCENARIOS[name])
    difference = difflib.unified_diff(expected, called, "Lightning 2.6.6", "lockstep", lineterm="", n=2)
    assert called == expected, "\n".join(["", *difference])


def test_every_golden_file_has_its_scenario() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(SCENARIOS)
