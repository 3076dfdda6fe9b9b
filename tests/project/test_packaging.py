"""pyproject.toml and constraints.txt agree with each other and with the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.ground import rank, torch_support

ROOT = Path(__file__).resolve().parents[2]
PINNED = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The [project] table; Python 3.10 reads TOML with the package that pytest brings there."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def names(requirements: list[str]) -> set[str]:
    """The distributions that are asked for, their names as package indexes compare them."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower() for line in requirements}


def test_version_is_everywhere_the_same(project: dict[str, Any]) -> None:
    assert lockstep.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_that_is_required_is_pinned(project: dict[str, Any]) -> None:
    required = names(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        required |= names(extra)
    assert required - {"torch-lockstep"} <= names(list(PINNED))  # the extra `test` takes other extras in


def test_run_time_needs_very_little(project: dict[str, Any]) -> None:
    assert names(project["dependencies"]) == {"torch", "cloudpickle", "numpy", "tqdm", "typing-extensions"}


def test_torch_is_pinned_in_the_spelling_that_scripts_install() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={PINNED['torch']}"]


def test_torch_is_bounded_by_what_was_tried(project: dict[str, Any]) -> None:
    """From the oldest on with which the whole suite ran; a newer one than was tried is told of when it is used."""
    (required,) = (line for line in project["dependencies"] if line.startswith("torch"))
    newest = ".".join(map(str, torch_support.NEWEST_TESTED))
    assert required == "torch>=2.11"
    pinned = tuple(map(int, PINNED["torch"].split(".")[:2]))
    assert (2, 11) <= pinned <= torch_support.NEWEST_TESTED
    assert f"torch 2.11 to {newest}" in (ROOT / "README.md").read_text()


def test_a_torch_that_nobody_tried_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(rank, "_warned", set())
    major, minor = torch_support.NEWEST_TESTED
    for version in (f"{major}.{minor}.9+cpu", f"{major}.9.1", f"{major}.{minor}.0a0+git1234"):
        torch_support.warn_of_untested_torch(version)
    assert not recwarn.list
    for _ in range(2):
        torch_support.warn_of_untested_torch(f"{major}.{minor + 1}.0+cu130")
    (told,) = recwarn.list
    assert f"torch {major}.{minor + 1}.0+cu130 is newer than {major}.{minor}" in str(told.message)


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


def test_the_other_distribution_of_this_name_is_reported_whichever_was_installed_first(tmp_path: Path) -> None:
    shutil.copytree(Path(lockstep.__path__[0]), tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lockstep-0.0.1.dist-info").mkdir()

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    imported = python("-c", "import lockstep; print(lockstep.__version__)")
    assert imported.stdout.strip() == lockstep.__version__
    assert "has the same folder as torch-lockstep. Run `pip uninstall lockstep torch-lockstep`" in imported.stderr
    (tmp_path / "lockstep" / "__init__.py").write_text("")  # as the other distribution's file
    ran = python("-m", "lockstep", "--version")
    assert ran.returncode == 2
    assert ran.stderr.startswith("lockstep: the distribution lockstep 0.0.1, a different project, has replaced ")
