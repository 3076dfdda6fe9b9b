"""pyproject.toml and constraints.txt agree with each other and with the package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import lockstep

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_is_said_once_and_the_same() -> None:
    (stated,) = re.findall(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    assert lockstep.__version__ == stated
    assert version("torch-lockstep") == stated
    assert f"## {stated}" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_that_is_required_is_pinned() -> None:
    names = {normal(re.split(r"[^\w.-]", line)[0]) for line in requires("torch-lockstep") or []}
    names.discard("torch-lockstep")  # the extra `test` takes other extras
    assert names <= {normal(name) for name in PINNED}


def test_run_time_needs_very_little() -> None:
    plain = [line for line in requires("torch-lockstep") or [] if "extra ==" not in line]
    assert {re.split(r"[^\w.-]", line)[0] for line in plain} == {"torch", "cloudpickle", "tqdm"}


def test_torch_is_pinned_in_the_spelling_that_scripts_install() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={PINNED['torch']}"]


def test_a_python_that_will_not_do_is_refused_by_name() -> None:
    command = f"cd {ROOT} && . scripts/environment.sh && find_python"
    good = subprocess.run(
        ["bash", "-c", command],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert good.returncode == 0, good.stderr
    bad = subprocess.run(
        ["bash", "-c", command],
        env={"PYTHON": "/bin/false", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode != 0
    assert "PYTHON=/bin/false" in bad.stderr
