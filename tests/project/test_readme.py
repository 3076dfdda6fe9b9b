"""What the README says: its first script runs as printed, its commands exist, its numbers are measured ones."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def first_script(folder: Path, processes: int) -> Path:
    script = blocks("python")[0]
    short = script.replace("max_epochs=20", "max_epochs=2").replace("devices=2", f"devices={processes}")
    if processes == 1:
        short = short.replace('strategy="ddp", ', "")
    assert short != script
    (folder / "first.py").write_text(short)
    return folder / "first.py"


def test_the_first_script_lies_in_the_repository() -> None:
    assert (ROOT / "first.py").read_text() == blocks("python")[0]


def test_other_blocks_name_what_is_there() -> None:
    for code in blocks("python")[1:]:
        exec("from lockstep import Trainer\n" + code, {})


def check(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "validation loss" in line]
    assert len(said) == 1, done.stdout  # by rank 0 alone
    checkpoints = list(folder.glob("lightning_logs/version_0/checkpoints/*.ckpt"))
    assert len(checkpoints) == 1
    assert checkpoints[0].name in done.stdout


def test_first_script_runs(ranks: RankPool, tmp_path: Path) -> None:
    """On two ranks that are there already."""
    script = first_script(tmp_path, 2)
    one, other = run_script(ranks, script, folder=tmp_path, world=2, launched=True)
    check(one, tmp_path)
    assert other.returncode == 0, other.stderr
    assert "validation loss" not in other.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_script_starts_its_ranks(tmp_path: Path) -> None:
    check(python(first_script(tmp_path, 2).name, folder=tmp_path), tmp_path)


def test_first_script_runs_on_one_process(ranks: RankPool, tmp_path: Path) -> None:
    (done,) = run_script(ranks, first_script(tmp_path, 1), folder=tmp_path)
    check(done, tmp_path)


def test_ctrl_c_before_the_first_validation_ended_in_a_key_error(ranks: RankPool, tmp_path: Path) -> None:
    script = first_script(tmp_path, 1)
    step = "        x, y = batch\n        return"
    struck = step.replace("return", "__import__('os').kill(__import__('os').getpid(), 2)\n        return")
    script.write_text(script.read_text().replace(step, struck, 1))
    (done,) = run_script(ranks, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Ctrl-C" in done.stdout
    assert "validation loss: None\n" in done.stdout
    assert "epoch=0-step=1.ckpt" in done.stdout


def test_commands_exist_and_can_be_run() -> None:
    """The two commands are an installation of this folder, and the first script; those of the project are there."""
    block, of_torch = blocks("bash")
    assert of_torch.startswith("pip install torch --index-url")
    commands = [line.split("#")[0].split() for line in block.splitlines()]
    assert commands == [["pip", "install", "."], ["python", "first.py"]]
    named = set(re.findall(r"`(scripts/\w+)`", README))
    assert named == {"scripts/demo", "scripts/docs", "scripts/gpu", "scripts/test"}
    for command in [*named, ".ci/run"]:
        assert os.access(ROOT / command, os.X_OK), f"{command} is not executable"
    for command in ("scripts/demo", "scripts/docs", "scripts/test", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / command)], check=True)


def test_what_is_measured_stands_on_its_page() -> None:
    """The numbers of the table of claims are those of the page that each row links."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| \[[\w-]+\]\(([\w/.-]+)\) \|$", README, re.MULTILINE)
    assert len(rows) == 5
    for measured, page in rows:
        numbers = [
            float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", (ROOT / page).read_text())
        ]
        for number in re.findall(r"\d+(?:\.\d+)?", measured):
            digits = len(number.partition(".")[2])
            assert any(f"{one:.{digits}f}" == number for one in numbers), f"{number} is not on {page}: {measured}"
