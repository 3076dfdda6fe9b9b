"""What becomes of findings: verdicts, limits, tables, the page and the README's rows; and how a device is asked."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import checks, devices, kernel_times, main, plan, report, surroundings
from benchmarks.gpu.parts import suite


def found(kind: str = "cuda", **parts: str) -> dict[str, Any]:
    """A run of which some parts have these verdicts."""
    check = {"name": "plain", "result": "passed", "numbers": {"waits a step": 0.0, "places": None}}
    return {
        "kind": kind,
        "device": "NVIDIA H100" if kind == "cuda" else "CPU, 2 cores",
        "devices": 2,
        "began": "2026-01-02 03:04 UTC",
        "command": "scripts/gpu",
        "commit": "abc",
        "sources": "def",
        "system": "Linux",
        "python": "3.12",
        "packages": {"torch": "2.11.0"},
        "libraries": {"NCCL": "2.28"} if kind == "cuda" else {},
        "parts": {
            name: {"result": told, "said": "", "seconds": 1.0, "checks": [check]} for name, told in parts.items()
        },
    }


# -- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "status", "seconds", "verdict", "said"),
    [
        (["passed", "skipped"], 0, 5, "passed", ""),
        (["skipped"], 0, 5, "skipped", ""),
        (["passed", "failed"], 0, 5, "failed", ""),
        (["passed"], None, 13, "failed", "ended at its limit of 10 s"),
        (["passed"], 1, 11, "failed", "ended at its limit of 10 s"),
        (["passed"], -11, 5, "failed", "ended with status -11"),
        ([], 0, 5, "failed", "made no check"),
    ],
)
def test_the_verdict_on_a_part(results: list[str], status: int | None, seconds: float, verdict: str, said: str) -> None:
    told = report.part_result([{"name": "", "result": each} for each in results], status, 10, seconds)
    assert told["result"] == verdict
    assert said in told["said"]
    assert bool(said) == bool(told["said"])


def test_the_last_line_counts_parts() -> None:
    run = found(fits="passed", waits="failed", several="skipped", speed="passed")
    assert report.last_line(run) == "GPU: 2 parts passed, 1 failed"


def test_parts_have_their_limits_and_what_is_spare() -> None:
    first, *rest = plan.PARTS
    whole = sum(each.seconds for each in plan.PARTS)
    assert plan.limit_of(first, rest, whole) == first.seconds
    assert plan.limit_of(first, rest, 2 * whole) == pytest.approx(2 * first.seconds)
    assert plan.limit_of(first, rest, 7) == 7
    assert plan.limit_of(plan.PARTS[-1], [], 900) == 900
    with pytest.raises(ValueError, match="no part is called sped; there are suite"):
        plan.chosen("speed,sped")
    assert [each.name for each in plan.chosen("speed,fits")] == ["fits", "speed"]


def test_parts_that_measure_no_time_run_side_by_side_where_there_are_cores() -> None:
    parts = plan.chosen("suite,fits,one_card,speed,memory")
    names = [[part.name for part in each] for each in plan.rounds(parts, 8)]
    assert names == [["suite", "fits", "one_card"], ["speed"], ["memory"]]
    assert [len(each) for each in plan.rounds(parts, 2)] == [1] * 5
    assert plan.rounds([], 8) == []


def test_parts_of_an_earlier_run_are_kept_and_told_of(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(found(fits="passed") | {"small": False}))
    now = found(speed="failed") | {"began": "2026-01-03 00:00 UTC", "sources": "ghi", "small": False}
    now["parts"] |= report.earlier_parts(tmp_path, now)
    text = report.overview(now)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert head[-1] == "run"
    assert {row[0]: row[-1] for row in rows} == {"fits": "2026-01-02 03:04 UTC, sources def", "speed": "as above"}
    assert "| run |" not in report.overview(found(fits="passed"))
    with pytest.raises(ValueError, match="a run with device NVIDIA H100, and this one has another"):
        report.earlier_parts(tmp_path, now | {"device": "another"})
    assert report.earlier_parts(tmp_path / "none", now) == {}


def test_what_an_error_says_names_files_as_in_the_checkout() -> None:
    """A page of results had the folder of the machine on which they were made."""
    said = checks.last_words(RuntimeError(f"rank 0 failed at {plan.ROOT}/benchmarks/gpu/scripts/ranks.py:87"))
    assert said == "RuntimeError: rank 0 failed at benchmarks/gpu/scripts/ranks.py:87"


def test_each_part_has_its_file() -> None:
    files = {file.stem for file in (plan.ROOT / "benchmarks" / "gpu" / "parts").glob("[!_]*.py")}
    assert files == {each.name for each in plan.PARTS}


# -- processes -------------------------------------------------------------------------------------------------


def test_a_process_has_a_limit_and_its_output_is_kept(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        hangs = [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"]
        assert main.in_process(hangs, 1.0, "hangs", log, str(tmp_path)) is None
        assert main.in_process([sys.executable, "-c", "raise SystemExit(3)"], 20, "fails", log, str(tmp_path)) == 3
    text = (tmp_path / "log").read_text()
    assert "begun" in text
    assert "hangs: exit status None" in text


def test_a_part_that_dies_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had found is kept, and the others run."""
    parts = [plan.PartPlan(name, "", 10) for name in ("fits", "waits")]

    def process(command: list[str], limit: float, *rest: Any) -> int:
        told = json.loads(command[-1])
        Path(told["kept"]).write_text('{"name": "one", "result": "passed"}\n')
        return -9 if told["part"] == "fits" else 0

    monkeypatch.setattr(main, "in_process", process)
    args = main.parsed(["--out", str(tmp_path), "--device", "cpu"])
    assert main.run(args, parts, found("cpu"), tmp_path, io.StringIO()) == 1
    kept = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [kept[name]["result"] for name in ("fits", "waits")] == ["failed", "passed"]
    assert kept["fits"]["checks"] == [{"name": "one", "result": "passed"}]


def test_a_device_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--out", str(tmp_path), "--parts", "none"]) == 2
    assert "no part is called none" in capsys.readouterr().err
    assert surroundings.devices("nothing")["devices"] == 0


def test_tests_of_another_package_are_not_imported(tmp_path: Path) -> None:
    first = main.environment(str(tmp_path))["PYTHONPATH"].split(":")[0]
    assert str(plan.ROOT / "tests") in (Path(first) / "tests" / "__init__.py").read_text()


# -- tables ----------------------------------------------------------------------------------------------------


def test_a_table_for_each_part() -> None:
    text = report.tables(found(waits="passed"))
    assert "| waits | passed | 1 | 0 | 0 | 1 |" in text
    assert "| plain | passed | waits a step 0; places – |" in text
    assert "not a measurement" not in text
    assert "not a measurement" in report.tables(found("cpu", waits="passed"))


def test_the_table_of_speed_has_a_row_for_each_way() -> None:
    ways = {"by hand": {"ms a step": 2.0, "over the loop": 1.0, "units/s": 50.0}, "Trainer": {"ms a step": 2.1}}
    text = report.speed([{"name": "GPT", "result": "passed", "numbers": {"unit": "tokens", "ways": ways, "more": 3}}])
    assert "| method | ms a step | over the loop | tokens/s | MFU | peak MiB | waits a step |" in text
    assert "| Trainer | 2.1 | – | – | – | – | – |" in text
    assert text.endswith("more 3")


def test_a_section_of_the_page_is_replaced_and_others_stay() -> None:
    page = f"# A device\n\n{report.BEGIN}\n{report.END}\n\nThe end.\n"
    page = report.with_section(page, found("cpu", waits="passed"))
    page = report.with_section(page, found(waits="failed"))
    once = report.with_section(page, found(waits="passed"))
    assert once == report.with_section(once, found(waits="passed"))
    assert [line for line in once.splitlines() if line.startswith("## ")] == [
        "## NVIDIA H100 x 2",
        "## CPU, 2 cores: a trial of the script"[:3] + report.title_of(found("cpu")),
    ]
    assert once.startswith("# A device\n")
    assert once.endswith("The end.\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        report.with_section("no such lines", found())


def test_rows_of_the_readme() -> None:
    assert report.rows_of(found("cpu", fits="passed")) == {}
    rows = report.rows_of(found(fits="passed", one_card="failed", several="passed"))
    assert set(rows) == {"one GPU", "NCCL on several GPUs"}
    assert "2026-01-02, NVIDIA H100, torch 2.11.0, commit abc" in rows["one GPU"]
    readme = "| where | when |\n|---|---|\n| CPU | always |\n| one GPU (CUDA) | not yet |\n"
    told = report.with_rows(readme, rows)
    assert "| CPU | always |\n| one GPU (CUDA) | 2026-01-02" in told
    assert "not yet" not in told


def test_failures_of_the_suite_by_file(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.engines.ddp.test_gpu" name="a"/>'
        '<testcase classname="tests.engines.ddp.test_gpu" name="b"><failure message="no card&#10;x"/></testcase>'
        '<testcase classname="tests.test_module" name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    by_file = suite.by_file(tmp_path / "tests.xml")
    assert by_file["tests/engines/ddp/test_gpu"] == (1, 1, 0, ["b: no card"])
    assert by_file["tests/test_module"] == (0, 0, 1, [])
    assert suite.by_file(tmp_path / "none.xml") == {}


def test_files_with_marked_tests_are_found() -> None:
    files = suite.marked()
    assert "tests/engines/ddp/test_native_batch_norm.py" in files
    assert "tests/gpu/test_report.py" not in files


# -- a device --------------------------------------------------------------------------------------------------


def test_waits_are_counted_by_place_while_they_are_armed() -> None:
    def warn() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with devices.counted_waits("cpu", armed=False, tells=True) as waits:
        warn()
        waits.armed = True
        for _ in range(3):
            warn()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert waits.total == 3
    assert waits.a_step(2) == 1.5
    ((place, count),) = (waits.places or {}).items()
    assert count == 3
    assert place.startswith("gpu/test_report.py:")
    assert place.endswith(" warn")


def test_a_cpu_tells_of_no_waits_and_no_memory() -> None:
    with devices.counted_waits("cpu") as waits:
        pass
    assert waits.total is waits.a_step(3) is None
    assert devices.peak("cpu") is devices.in_use("cpu") is None


class Event:
    """Moments a millisecond apart."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


class Module:
    """What the clock and memory ask of ``torch.cuda``."""

    Event = Event
    waits = 0

    def synchronize(self) -> None:
        Module.waits += 1

    def max_memory_allocated(self) -> int:
        return 3 * 2**20


def test_a_clock_waits_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "module_of", lambda device: Module())
    clock = devices.Clock("cuda")
    for _ in range(4):
        clock.tick()
    assert Module.waits == 0
    assert clock.intervals() == [1.0, 1.0, 1.0]
    assert Module.waits == 1
    assert devices.peak("cuda") == 3.0


def test_kernels_gaps_and_work_of_a_profile() -> None:
    told = kernel_times.summary([(0, 10), (5, 20), (220, 240)], 2)
    assert told == {"kernels a step": 1.5, "device at work": 0.167, "gaps a step": 0.5}
    assert kernel_times.summary([], 2) == {}
