"""The scripts of the corpora are what they say: the healthy train as one process trains, the others do not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.extensions.verify import references
from tests.extensions.verify.bugs import BUGS
from tests.extensions.verify.references import Parameters
from tests.extensions.verify.small_script import SCRIPTS

HERE = Path(__file__).parent
HEALTHY = sorted(path.stem for path in (SCRIPTS / "healthy").glob("*.py"))
STEPS = 6
TO_THE_END = 100

ON_FOUR = ["ddp_accumulation", "ddp_join", "fsdp2", "language_model", "lightning_automatic", "tensor_parallel"]

# Where the weights show it; the others have a test of their own below.
IN_WEIGHTS = [name for name in BUGS if name not in {"padded_metrics", "resume_first_order", "same_data"}]


@dataclass
class Run:
    """What ranks of a script noted: for each its parameters after each step, and its inputs."""

    steps: list[list[Parameters]]
    inputs: list[list[Tensor]]
    printed: str


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Recorder:
    """A process that has imported torch once, and forks the ranks of each run."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "record.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(
        self, folder: Path, path: Path, ranks: int, steps: int, *arguments: str, dtype: str = "float64"
    ) -> Run:
        folder.mkdir()
        order = {"folder": str(folder), "ranks": ranks, "steps": steps, "dtype": dtype, "script": str(path)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**order, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        printed = (folder / "printed.txt").read_text()
        assert answer == "0\n", printed
        noted = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
        return Run([n["steps"] for n in noted], [n["inputs"] for n in noted], printed)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def record() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.py"
    path.write_text(BUGS[name].text)
    return path


def reference(path: Path, name: str, ranks: int, run: Run, steps: int) -> list[Parameters]:
    made = getattr(references, name)(load(path), ranks, run.inputs)
    return [parameters for parameters, _ in zip(made, range(steps), strict=False)]


def assembled(steps: list[list[Parameters]]) -> list[Parameters]:
    """Whole parameters of the hand-written tensor parallelism: the layers' rows, their biases, columns, a bias."""
    joined = []
    for parts in zip(*steps, strict=True):
        up, up_bias, down, down_bias = zip(*parts, strict=True)
        joined.append([torch.cat(up), torch.cat(up_bias), torch.cat(down, dim=1), down_bias[0]])
    return joined


def distance(ours: Parameters, theirs: Parameters) -> float:
    """The largest difference, in parts of the parameter's largest value."""
    return max(
        float((a - b.reshape_as(a)).abs().max() / b.abs().max().clamp(min=1e-3))
        for a, b in zip(ours, theirs, strict=True)
    )


def distances(run: Run, expected: list[Parameters], rank: int = 0) -> list[float]:
    return [distance(ours, theirs) for ours, theirs in zip(run.steps[rank], expected, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in HEALTHY), *((name, 4) for name in ON_FOUR)])
def test_healthy_trains_as_one_process(name: str, ranks: int, tmp_path: Path, record: Recorder) -> None:
    path = SCRIPTS / "healthy" / f"{name}.py"
    run = record(tmp_path / "notes", path, ranks, TO_THE_END if name == "ddp_join" else STEPS)
    if name == "tensor_parallel":
        run.steps = [assembled(run.steps)] * ranks
    expected = reference(path, name, ranks, run, len(run.steps[0]))
    assert len(expected) >= 4
    for rank in range(ranks):
        if name == "ddp_join":  # a rank that has run out makes no step
            assert max(distances(run, expected[: len(run.steps[rank])], rank)) < 1e-12
        else:
            assert max(distances(run, expected, rank)) < 1e-10
    optimizers = 2 if name in {"gan", "lightning_manual"} else 1
    assert distance(expected[0], expected[-optimizers]) > 1e-4, "nothing was trained"


@pytest.mark.slow
def test_low_precision_trains_as_one_process(tmp_path: Path, record: Recorder) -> None:
    torch.set_default_dtype(torch.float32)
    path = SCRIPTS / "healthy" / "bf16_autocast.py"
    run = record(tmp_path / "notes", path, 2, STEPS, dtype="float32")
    found = distances(run, reference(path, "bf16_autocast", 2, run, STEPS))
    assert 0 < max(found) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_bug_trains_something_else(name: str, tmp_path: Path, record: Recorder) -> None:
    path = written(name, tmp_path)
    run = record(tmp_path / "notes", path, 2, STEPS)
    expected = reference(path, name, 2, run, STEPS)
    found = distances(run, expected)
    first = BUGS[name].first_step
    assert first is not None
    assert max([0.0, *found[:first]]) < 1e-12
    assert found[first] > 1e-4
    # One rank trains as one process does, except where the loop itself is wrong: the number of ranks is what matters.
    alone = record(tmp_path / "alone", path, 1, STEPS + 2)
    expected = reference(path, name, 1, alone, STEPS + 2)
    agrees = max(distances(alone, expected)) < 1e-10
    assert agrees == BUGS[name].one_process_is_right


@pytest.mark.slow
def test_ranks_read_the_same_data(tmp_path: Path, record: Recorder) -> None:
    path = written("same_data", tmp_path)
    run = record(tmp_path / "notes", path, 2, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(*run.inputs, strict=True))
    alone = record(tmp_path / "alone", path, 1, STEPS)
    assert max(distances(run, alone.steps[0])) < 1e-12, "two ranks train what one does"


@pytest.mark.slow
def test_metric_counts_samples_twice(tmp_path: Path, record: Recorder) -> None:
    path = written("padded_metrics", tmp_path)
    run = record(tmp_path / "notes", path, 2, STEPS)
    assert max(distances(run, reference(path, "padded_metrics", 2, run, STEPS))) < 1e-10, "the training is right"
    assert "on 30 samples" in run.printed
    assert "on 29 samples" in record(tmp_path / "alone", path, 1, STEPS + 1).printed


@pytest.mark.slow
def test_resume_repeats_the_first_order(tmp_path: Path, record: Recorder) -> None:
    path = written("resume_first_order", tmp_path)
    first = record(tmp_path / "first", path, 2, 7, "--checkpoint", "stopped.pt")  # stopped in the third epoch of three
    expected = reference(path, "resume_first_order", 2, first, 12)
    assert max(distances(first, expected[:7])) < 1e-10, "undisturbed, it is right"
    second = record(tmp_path / "second", path, 2, 6, "--checkpoint", "stopped.pt")
    assert distances(second, expected[6:])[0] > 1e-4
    again = [torch.equal(a, b) for a, b in zip(second.inputs[0], first.inputs[0], strict=False)]
    assert all(again[:6]), "it reads the batches of the first epochs again"


@pytest.mark.parametrize("name", BUGS)
def test_cause_is_a_line(name: str) -> None:
    lines = [line.strip() for line in BUGS[name].text.splitlines()]
    assert lines.count(BUGS[name].cause) == 1
