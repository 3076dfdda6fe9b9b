"""Pytest's fixture `verified`: tests of a folder that has nothing else, as users write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extensions.verify.bugs import BUGS
from tests.extensions.verify.small_script import SCRIPT
from tests.tools.core import copy_without

TESTS = """\
import sys


def test_ranks(verified):
    (certificate,) = verified("train.py", devices=[4], steps=2)
    assert certificate["verdict"] == "alike"
    assert certificate["devices"] == 2
    assert "torch" not in sys.modules


def test_wrong(verified):
    verified("wrong.py", steps=2)


def test_no_script(verified):
    verified("nothing.py")


def test_no_step(verified):
    verified("empty.py")


def test_skipped(verified):
    verified("empty.py", unknown="skip")
"""


def run_pytest(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "pytest_lockstep", "-p", "no:cacheprovider", "-q", *words]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_scripts_are_verified_and_failures_are_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tests").mkdir()
    files = {"tests/test_ranks.py": TESTS, "train.py": SCRIPT, "wrong.py": BUGS["no_sync_everywhere"].text}
    for name, text in {**files, "empty.py": "", "pytest.ini": "[pytest]\n"}.items():
        Path(name).write_text(text)
    run = run_pytest("--verify-ranks", "2")
    assert "3 failed, 1 passed, 1 skipped" in run.stdout, run.stdout + run.stderr
    assert "cause: gradients are not averaged: no_sync()" in run.stdout
    assert f"nothing.py does not exist (working directory: {tmp_path})" in run.stdout
    assert run.stdout.count("the script ended without a step of a torch.optim.Optimizer") >= 1
    assert "Traceback" not in run.stdout
    assert "fixture.py" not in run.stdout.partition("short test summary")[0]
    assert not list(tmp_path.glob("certificate*"))


def test_a_run_that_does_not_use_it_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_own.py").write_text(
        "import sys\n\ndef test_own():\n    assert not {'lockstep', 'torch', 'numpy'} & sys.modules.keys()\n"
    )
    run = run_pytest()
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_without_the_extension_only_its_use_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_without(tmp_path / "core", ["verify"])
    Path("test_own.py").write_text("def test_own():\n    pass\n\ndef test_ranks(verified):\n    pass\n")
    run = run_pytest(
        "test_own.py", PYTHONPATH=os.pathsep.join([str(tmp_path / "core"), os.environ.get("PYTHONPATH", "")])
    )
    assert "1 passed, 1 error" in run.stdout, run.stdout + run.stderr
    assert "MissingExtension: the service \"pytest's fixture verified\" belongs to the extension 'verify'" in run.stdout
