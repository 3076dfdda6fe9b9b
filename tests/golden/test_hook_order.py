"""The order in which hooks are called, and what they can see then, is that of Lightning 2.6.6."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import pytest

from tests.golden.recorder import SCENARIOS, record

GOLDEN = Path(__file__).parent / "hook_order"

# Lightning asks for the loaders of an evaluation with gradients already switched off, lockstep before it does so: of
# these calls the place is compared, and every fact but that one.
LOADER = re.compile(r"(module|data)\.(train|val|test|predict)_dataloader\b")

# Facts that differ on purpose, by scenario: of a line that matches, only the group is compared.
CUT_SHORT = r"^(\w+\.(?:on_train_end|on_fit_end|teardown)\b.*) epoch=\d+"
UNLIKE = {
    # An epoch that was cut short is not counted as finished, so that a later fit goes on inside it.
    "max_steps": CUT_SHORT,
    "max_steps_accumulate": CUT_SHORT,
    "stop_in_epoch": CUT_SHORT,
    # `is_last_batch` is false before the first batch of a fit, and where a user ends the epoch before the loader does.
    "end_epoch": r"^(.*) last$",
    "resume": r"^(.*) last$",
}


def saved_behind(lines: list[str]) -> list[str]:
    """The saves of a step behind the module's `on_train_batch_end`, which changes what is saved; Lightning's come
    before it."""
    kept: list[str] = []
    for line in lines:
        place = len(kept)
        while line.startswith("module.on_train_batch_end") and "on_save_checkpoint" in kept[place - 1]:
            place -= 1
        kept.insert(place, line)
    return kept


def in_order(name: str, lines: list[str]) -> list[str]:
    """What is compared."""
    kept = [line.replace(" no_grad", "") if LOADER.match(line) else line for line in saved_behind(lines)]
    return [re.sub(UNLIKE[name], r"\1", line) for line in kept] if name in UNLIKE else kept


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_hooks_come_in_lightnings_order(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())["calls"]
    recorded = record("lockstep", SCENARIOS[name])
    expected, called = in_order(name, golden), in_order(name, recorded)
    difference = difflib.unified_diff(expected, called, "Lightning 2.6.6", "lockstep", lineterm="", n=2)
    assert called == expected, "\n".join(["", *difference])


def test_every_golden_file_has_its_scenario() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(SCENARIOS)


def test_a_call_out_of_order_is_noticed() -> None:
    golden = json.loads((GOLDEN / "fit.json").read_text())["calls"]
    place = next(index for index, line in enumerate(golden) if line.startswith("optimizer zeroed"))
    moved = [*golden[: place - 3], golden[place], *golden[place - 3 : place], *golden[place + 1 :]]
    assert sorted(moved) == sorted(golden)
    assert in_order("fit", moved) != in_order("fit", golden)
