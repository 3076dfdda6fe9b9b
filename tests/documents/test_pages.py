"""The Python of a user's page is one program that runs from top to bottom in a fresh folder.

docs/how-to.md has a program for each answer, and docs/first-steps.md two scripts with their commands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.fresh import ended

PROJECT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    "architecture": "a sketch of the loop, for who changes it",
    "finetune": "it needs a folder of pretrained weights",
    "slurm-search": "it needs SLURM",
    "verify": "the loop of a script, with the mistake that the page is about, and a test for pytest",
}
TORCHRUN = ("ddp", "communication-hooks")
"""Pages whose program torchrun starts, once for each rank."""


def program(page: Path) -> str:
    return "\n\n".join(BLOCK.findall(page.read_text()))


SEVERAL_PROGRAMS = ("first-steps", "how-to")
PAGES = {
    page.stem: page for page in sorted(PROJECT.glob("docs/*.md")) if program(page) and page.stem not in SEVERAL_PROGRAMS
}

FIRST_STEPS = (PROJECT / "docs" / "first-steps.md").read_text()
HOW_TO = (PROJECT / "docs" / "how-to.md").read_text().split("\n## ")
MODEL = BLOCK.findall(HOW_TO[0])[0]
ANSWERS = {part.splitlines()[0]: BLOCK.findall(part)[0] for part in HOW_TO[1:] if BLOCK.search(part)}


def test_a_page_defines_what_it_uses(tmp_path: Path) -> None:
    for name, page in PAGES.items():
        if name not in ("architecture", "finetune", "verify"):
            (tmp_path / f"{name}.py").write_text(program(page))
    for number, script in enumerate([*ANSWERS.values(), MODEL, *BLOCK.findall(FIRST_STEPS)]):
        (tmp_path / f"script_{number}.py").write_text(script)
    assert len(list(tmp_path.iterdir())) > 30
    rules = "F821,F822,F823,E9"  # names that are not defined, and what is no Python
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rules, str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(PAGES.keys() - NOT_RUN.keys()))
def test_a_page_runs_from_top_to_bottom(tmp_path: Path, name: str) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    script = tmp_path / "page.py"
    script.write_text(program(PAGES[name]))
    command = [sys.executable, "page.py"]
    if name in TORCHRUN:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "page.py"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    done = ended(command, tmp_path, 280, environ)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_runs(tmp_path: Path, question: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(ANSWERS[question])
    done = ended([sys.executable, "train.py"], tmp_path, 110, dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_first_steps_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scripts = BLOCK.findall(FIRST_STEPS)
    for name, script in zip(("train.py", "plot.py"), scripts, strict=True):
        (tmp_path / name).write_text(script)
    commands = re.findall(r"^python (.+)$", FIRST_STEPS, re.MULTILINE)
    assert len(commands) == 4
    printed = ""
    for command in commands:
        done = ended([sys.executable, *command.split()], tmp_path, 60, dict(os.environ))
        assert done.returncode == 0, done.stderr[-3000:]
        printed += done.stdout + done.stderr
    assert "max_epochs=5 reached" in printed
    assert printed.count("restoring from") == 2
    assert "as 1 micro-batch of 50 on each rank" in printed
    assert (tmp_path / "spiral.png").stat().st_size > 1000
