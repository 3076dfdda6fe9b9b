"""The parts of `scripts/gpu` run on a CPU, with small models: what fails on a device's day is not their own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.checks import FAILED, PASSED, SKIPPED, Part, run_part
from benchmarks.gpu.plan import PARTS, ROOT
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool

if not is_there("extras"):
    pytest.skip("needs the extension extras", allow_module_level=True)

from benchmarks.gpu.parts import life, speed, steps

EVERYDAY = ("fits", "waits", "collectives", "memory", "kernels")


def wrong(found: list[dict[str, Any]]) -> list[str]:
    return [f"{one['name']}: {one['said']}" for one in found if one["result"] == FAILED]


@pytest.fixture
def part(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    """A small one that uses the session's ranks, and leaves them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Part, "close", lambda self: None)
    return Part("cpu", small=True, limit=100, without=["lightning", "accelerate"], pool=ranks(2).pool)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_part_runs_on_a_cpu(name: str, part: Part) -> None:
    found = run_part(part, name)
    assert not wrong(found)
    assert sum(one["result"] == PASSED for one in found) > 2


def test_steps_are_measured_while_a_checkpoint_is_written(part: Part) -> None:
    part.check("saving", steps.saving, part)
    assert not wrong(part.found)
    assert part.found[0]["numbers"]["MiB"] > 1
    assert part.found[0]["numbers"]["ms in save_checkpoint"] > 0


def test_each_model_is_trained_in_each_way(part: Part) -> None:
    case = speed.cases("cpu", small=True)[-1]  # the smallest model
    with speed.one_rank_group("cpu"):
        numbers = speed.measured(part, case)
    assert set(numbers["ways"]) == {speed.HAND, speed.TORCH, speed.TORCH_HOOK, speed.CONTAINER, speed.TRAINER}
    for way in numbers["ways"].values():
        assert way["ms a step"] > 0
        assert way["peak MiB"] is way["waits a step"] is way["MFU"] is None  # which no CPU tells


def test_two_ranks_are_one_process(part: Part) -> None:
    """One case of each kind; the others differ in their flags."""
    from benchmarks.gpu import equal

    for name in ("ddp, accumulated and clipped", "tensor parallel"):
        part.check(name, equal.compared, part, name, 2, "cpu", True)
    part.check("dropout", equal.alike, part, "dropout", 2, "cpu")
    assert not wrong(part.found)


def test_profilers_and_monitors_write(part: Part) -> None:
    for function in (life.profiled, life.observed, *([life.counted] if is_there("extras") else [])):
        part.check(function.__name__, function, part)
    assert not wrong(part.found)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_whole_script_on_a_cpu(tmp_path: Path) -> None:
    """With more seconds than a card takes: two cores share it with other tests."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), "--out", str(tmp_path), "--device", "cpu", "--small"]
    command += ["--seconds", "1900"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == f"GPU: {len(PARTS) - 0} parts passed, 0 failed"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["parts"]) == [each.name for each in PARTS]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]


# -- checks ----------------------------------------------------------------------------------------------------


def test_a_check_that_raises_ends_no_part(part: Part) -> None:
    def raises() -> None:
        raise ValueError("no such\nthing")

    def left_out() -> None:
        raise checks.Skip("no card")

    part.check("good", lambda: {"ms": 1.5})
    part.check("bad", raises)
    part.check("missed", lambda: checks.expect(False, "too slow", {"ms": 3.0}))  # type: ignore[arg-type, return-value]
    part.check("left out", left_out)
    assert [one["result"] for one in part.found] == [PASSED, FAILED, FAILED, SKIPPED]
    assert part.found[1]["said"] == "ValueError: no such"
    assert part.found[2]["numbers"] == {"ms": 3.0}


def missed_on_a_rank() -> None:
    checks.expect(False, "the ranks differ", {"differ": 2})


def test_what_a_rank_missed_is_told_with_its_numbers(part: Part) -> None:
    part.check("on ranks", lambda: {"found": part.ranks(2, missed_on_a_rank)})
    (told,) = part.found
    assert told["said"] == "the ranks differ"
    assert told["numbers"] == {"differ": 2}


def test_no_check_begins_when_the_time_is_over(tmp_path: Path) -> None:
    part = Part("cpu", limit=0.0, kept=tmp_path / "kept")
    part.check("late", lambda: pytest.fail("it began"))
    assert "not begun" in json.loads((tmp_path / "kept").read_text())["said"]
