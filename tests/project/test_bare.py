"""A newcomer's machine: nothing is installed but lockstep, what it requires, and at most one extra.

Every environment of the tests has numpy, PyYAML and two hundred more, so that an import of what nobody has declared was
seen by nobody. CI runs the slow tests of this file, too (.ci/run).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.linked import PROJECT, ROOT, linked_environment
from tests.project.test_readme import blocks, check

PROGRAMS = ROOT / "tests" / "project" / "extras.py"
OF_THE_PROJECT = ("test", "bench", "docs", "examples", "third-parties")
"""Extras of which lockstep itself imports nothing."""
OF_MODELS = ("peft",)
"""Extras of which it imports something where a module has been made by them, so that they are there."""
EXTRAS = sorted(PROJECT["optional-dependencies"].keys() - {*OF_THE_PROJECT, *OF_MODELS})
WALK = """
import importlib, pkgutil, lockstep
for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(f"{module.name}: {error}")
"""


def ran(python: Path, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(python), *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False
    )


def outcomes(python: Path, rows: list[tuple[str, str | None]]) -> dict[str, str]:
    done = ran(python, str(PROGRAMS), json.dumps(rows))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- environments of links -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_extra_that_is_not_installed_is_named(tmp_path: Path) -> None:
    """Fits run with what is required alone; what needs more says which extra brings it, when it is asked for."""
    found = outcomes(linked_environment(tmp_path), [(extra, None) for extra in EXTRAS])
    assert found.pop("metrics") == "ModuleNotFoundError: No module named 'torchmetrics'"  # the program's own import
    for extra, said in found.items():
        assert re.match(rf"MissingExtra: .+ needs the package `.+torch-lockstep\[{extra}\]", said), said


@pytest.mark.slow
def test_every_file_can_be_imported_or_names_its_extra(tmp_path: Path) -> None:
    done = ran(linked_environment(tmp_path), "-c", WALK)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for line in done.stdout.splitlines():
        assert "torch-lockstep[" in line, line


@pytest.mark.slow
def test_each_extra_works_alone(tmp_path: Path) -> None:
    rows = []
    for extra in EXTRAS:
        python = linked_environment(tmp_path / extra, extra)
        rows.append((extra, str(next(python.parents[1].glob("lib/python*/site-packages")))))
    assert outcomes(linked_environment(tmp_path / "bare"), rows) == dict.fromkeys(EXTRAS, "")


# -- a real one ----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """An interpreter for which the README's first command was given."""
    folder = tmp_path / "environment"
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        (torch,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        # torch goes first and by its exact version: a bare "torch" would take a build with gigabytes of CUDA
        for asked in (torch, str(ROOT)):
            subprocess.run([*pip, asked], check=True, timeout=500)
        yield folder / "bin" / "python"
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_the_two_commands_of_the_readme_failed_on_a_fresh_machine(installed: Path, tmp_path: Path) -> None:
    """`import numpy`, which no dependency brought: nobody came beyond the first line."""
    (tmp_path / "first.py").write_text(blocks("python")[0])
    done = ran(installed, "first.py", folder=tmp_path)
    check(done, tmp_path)
    assert "Failed to initialize NumPy" not in done.stderr
    told = ran(installed, "-m", "lockstep", "env", folder=tmp_path).stdout
    assert "\nrequired packages:\n" in told
    assert "MISSING" not in told
    assert told.index("required packages:") < told.index("optional packages:")
    missing = ran(installed, "-c", "from lockstep.callbacks import RichProgressBar\nRichProgressBar()", folder=tmp_path)
    assert 'pip install ".[rich]"' in missing.stderr
