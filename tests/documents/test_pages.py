"""The Python of a user's page is one program: it runs from top to bottom in a fresh folder."""

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
    "verify": "the loop of a script, with the mistake that the page is about",
}
TORCHRUN = ("ddp", "communication-hooks")
"""Pages whose program torchrun starts, once for each rank."""


def program(page: Path) -> str:
    return "\n\n".join(BLOCK.findall(page.read_text()))


PAGES = {page.stem: page for page in sorted(PROJECT.glob("docs/*.md")) if program(page)}


def test_a_page_defines_what_it_uses(tmp_path: Path) -> None:
    for name, page in PAGES.items():
        if name not in ("architecture", "finetune", "verify"):
            (tmp_path / f"{name}.py").write_text(program(page))
    assert len(list(tmp_path.iterdir())) > 10
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
