"""The profilers by themselves, without a Trainer."""

from __future__ import annotations

import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.objects import make_profiler
from lockstep.ground.errors import MisconfigurationException
from lockstep.profilers.base import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler
from lockstep.profilers.pytorch import PyTorchProfiler, RegisterRecordFunction


def busy() -> None:
    sum(range(1000))


@pytest.mark.parametrize(
    ("flag", "kind"), [("simple", SimpleProfiler), ("advanced", AdvancedProfiler), ("PyTorch", PyTorchProfiler)]
)
def test_a_profiler_by_name(flag: str, kind: type[Profiler]) -> None:
    assert type(make_profiler(flag)) is kind


def test_no_profiler_and_an_own_one() -> None:
    own = PassThroughProfiler()
    assert make_profiler(own) is own
    assert make_profiler(None) is None
    outer(own)
    assert own.summary() == ""


@pytest.mark.parametrize("flag", ["fancy", "xla", True, SimpleProfiler])
def test_what_is_no_profiler_is_refused(flag: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r'profiler=.* "simple", "advanced", "pytorch"'):
        make_profiler(flag)


# -- simple ---------------------------------------------------------------------------------------------------


def test_simple_adds_up_the_calls_of_an_action() -> None:
    profiler = SimpleProfiler()
    for _ in range(3):
        with profiler.profile("long"), profiler.profile("short"):
            pass
        with profiler.profile("long"):
            time.sleep(0.002)
    assert {name: len(calls) for name, calls in profiler.recorded_durations.items()} == {"long": 6, "short": 3}
    assert 0.006 <= sum(profiler.recorded_durations["long"]) < time.perf_counter() - profiler.start_time
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in profiler.summary().splitlines() if "|" in line]
    assert rows[0] == ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
    assert [(row[0], row[2]) for row in rows[1:]] == [("Total", "9"), ("long", "6"), ("short", "3")]
    assert float(rows[2][1]) == pytest.approx(float(rows[2][3]) / 6, rel=1e-3)


def test_simple_in_short() -> None:
    profiler = SimpleProfiler(extended=False)
    with profiler.profile("one"):
        pass
    assert "Num calls" not in profiler.summary()
    assert re.search(r"\| one +\|", profiler.summary())


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_an_action_that_was_never_started_cannot_stop(kind: type[Profiler]) -> None:
    with pytest.raises(ValueError, match="'one' was never started"):
        kind().stop("one")


def test_an_action_cannot_start_twice_and_ends_with_an_error() -> None:
    profiler = SimpleProfiler()
    with pytest.raises(ValueError, match="'one' is running already"), profiler.profile("one"):
        profiler.start("one")
    assert len(profiler.recorded_durations["one"]) == 1


# -- where reports go -----------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_was_found_out_behind_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MisconfigurationException, match=r"SimpleProfiler\(dirpath=.*the folder is not writable"):
        SimpleProfiler(dirpath=tmp_path / "file" / "x", filename="perf").setup("fit")


def test_the_report_goes_to_a_file_named_after_stage_and_rank(tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path / "new", filename="my perf")
    profiler.setup("fit", 1, str(tmp_path / "log"))
    with profiler.profile("one"):
        pass
    profiler.describe()
    (written,) = (tmp_path / "new").iterdir()
    assert written.name == "fit-my_perf-1.txt"
    assert written.read_text().startswith("FIT Profiler Report\n")
    profiler.describe()
    assert written.read_text().count("Profiler Report") == 2  # a second call is added


def test_the_logs_folder_is_taken_where_none_is_given(tmp_path: Path) -> None:
    profiler = SimpleProfiler(filename="perf")
    profiler.setup("test", 0, str(tmp_path))
    profiler.describe()
    assert [path.name for path in tmp_path.iterdir()] == ["test-perf-0.txt"]


@pytest.mark.parametrize(("rank", "shown"), [(None, True), (0, True), (1, False)])
def test_the_screen_is_rank_zeros(rank: int | None, shown: bool, caplog: pytest.LogCaptureFixture) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit", rank)
    with caplog.at_level("INFO", logger="lockstep"):
        profiler.describe()
    assert ("FIT Profiler Report" in caplog.text) == shown


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"SimpleProfiler\(dirpath='s3://bucket'\)"):
        SimpleProfiler(dirpath="s3://bucket")


# -- advanced -------------------------------------------------------------------------------------------------


def outer(profiler: Profiler) -> None:
    with profiler.profile("outer"):
        busy()
        with profiler.profile("inner"):
            busy()
            busy()
        busy()


def test_advanced_counts_functions_for_the_innermost_action() -> None:
    profiler = AdvancedProfiler()
    outer(profiler)
    calls = {}
    for text in profiler.summary().split("Profile stats for: ")[1:]:
        calls[text.split("\n")[0]] = sum(int(line.split()[0]) for line in text.splitlines() if "(busy)" in line)
    assert calls == {"outer": 2, "inner": 2}


def test_advanced_lists_so_many_functions() -> None:
    profiler = AdvancedProfiler(line_count_restriction=1)
    outer(profiler)
    assert "due to restriction <1>" in profiler.summary()


def test_advanced_writes_what_it_recorded(tmp_path: Path) -> None:
    import pstats

    profiler = AdvancedProfiler(dirpath=tmp_path, filename="perf", dump_stats=True)
    outer(profiler)
    profiler.describe()
    assert {path.name for path in tmp_path.iterdir()} == {"perf.txt", "perf-outer.prof", "perf-inner.prof"}
    functions = pstats.Stats(str(tmp_path / "perf-inner.prof")).stats  # type: ignore[attr-defined]
    assert any(name == "busy" for _, _, name in functions)
    assert not profiler.profiled_actions


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_a_profiler_travels_to_another_process(kind: type[Profiler], tmp_path: Path) -> None:
    profiler = kind(dirpath=tmp_path, filename="perf")
    with profiler.profile("one"):
        busy()
    again = pickle.loads(pickle.dumps(profiler))
    assert (again.dirpath, again.filename) == (str(tmp_path), "perf")
    with again.profile("two"):
        busy()
    assert "Profiler Report" in again.summary() or kind is PyTorchProfiler
    profiler.teardown(None)
    again.teardown(None)


# -- torch's --------------------------------------------------------------------------------------------------


ALL: Any = lambda step: torch.profiler.ProfilerAction.RECORD  # noqa: E731


def table_of(text: str, step: str) -> dict[str, int]:
    """Calls by operator, of the part of a report that is about one kind of step."""
    (part,) = (one for one in text.split("Profile stats for: ")[1:] if one.split("\n")[0].split(" ")[0] == step)
    rows = re.findall(r"^ +(\S.*?)  .*?(\d+)  $", part, re.MULTILINE)
    return {name: int(count) for name, count in rows}


def test_pytorch_records_the_steps_that_its_schedule_names() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    profiler = PyTorchProfiler(schedule=schedule, row_limit=-1)
    for number in range(8):
        # sines outside of the steps that are recorded
        take(profiler, "training_step", 1, torch.cos if number in (2, 3) else lambda x: x.cos().sin())
    calls = table_of(profiler.summary(), "training_step")
    assert calls["aten::cos"] == calls["[pl][profile][Strategy]One.training_step"] == 2
    assert "aten::sin" not in calls


def take(profiler: Profiler, step: str, count: int = 1, function: Any = torch.cos) -> None:
    """Some steps of a kind."""
    for _ in range(count):
        with profiler.profile(f"[Strategy]One.{step}"):
            function(torch.ones(3))


def test_pytorch_counts_each_kind_of_step_by_itself() -> None:
    profiler = PyTorchProfiler(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1), row_limit=-1)
    take(profiler, "training_step", 3)
    take(profiler, "validation_step", 4, torch.sin)
    text = profiler.summary()
    assert table_of(text, "training_step")["aten::cos"] == 1
    assert table_of(text, "validation_step")["aten::sin"] == 1


def test_pytorch_writes_a_trace(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="perf", schedule=ALL)
    profiler.observe(nn.Sequential(nn.Linear(2, 2)))
    take(profiler, "training_step")
    profiler.describe()
    (trace,) = tmp_path.glob("*.pt.trace.json")
    assert trace.name.startswith("perf-training_step.")
    assert "aten::cos" in {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


def test_pytorch_hands_traces_to_the_users_function() -> None:
    seen: list[Any] = []
    profiler = PyTorchProfiler(on_trace_ready=seen.append, schedule=ALL)
    take(profiler, "training_step")
    profiler.describe()
    assert [type(one) for one in seen] == [torch.profiler.profile]


def test_submodules_are_labelled_while_it_lasts() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.profiler.profile() as recorded:
        with RegisterRecordFunction(model):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    labels = [event.key for event in recorded.events() if event.key.startswith("[pl][module]")]
    assert labels == ["[pl][module]torch.nn.modules.linear.Linear: 0"]
    assert not model[0]._forward_hooks


def test_a_sort_key_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="sort_by_key='beauty'"):
        PyTorchProfiler(sort_by_key="beauty")
