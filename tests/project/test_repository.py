"""The files around the code: policies, forms, workflows, the package's parts list, and the script for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.ground import torch_support
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def loaded(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


def test_the_script_for_programs_trains_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "AGENTS.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    one, other = run_script(ranks, tmp_path / "train.py", folder=tmp_path, world=2, launched=True)
    assert one.returncode == other.returncode == 0, one.stderr
    assert one.stdout.startswith("max_epochs=3 reached 0.")
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert other.stdout == ""


def test_the_pages_for_contributors_are_short_and_their_commands_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 60
    for name in re.findall(
        r"`((?:scripts|benchmarks|tests|docs|\.ci)/[\w./-]+)", text + (ROOT / "AGENTS.md").read_text()
    ):
        assert (ROOT / name).exists(), name
    for page in ("SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "AGENTS.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / link).exists(), f"{page}: {link}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_asks_for_no_more_than_it_needs(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {}
    for used in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", used), used
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"], name
        assert "permissions" in job, name
        for command in re.findall(r"(?:scripts|\.ci)/\w+", "\n".join(step.get("run", "") for step in job["steps"])):
            assert os.access(ROOT / command, os.X_OK), command


def test_the_workflows_run_the_oldest_and_the_newest_torch() -> None:
    matrix = loaded(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["torch"]["strategy"]["matrix"]["include"]
    newest = ".".join(map(str, torch_support.NEWEST_TESTED))
    assert [row["torch"] for row in matrix] == ["2.11.0", f"{newest}.0"]
    assert matrix[0]["python"] == "3.10"


def test_both_forms_ask_for_what_lockstep_env_prints() -> None:
    forms = [loaded(path) for path in FORMS if path.name != "config.yml"]
    assert {form["name"] for form in forms} == {"A bug", "A wrong number"}
    assert all(any("lockstep env" in field["attributes"].get("label", "") for field in form["body"]) for form in forms)


def test_the_parts_list_names_what_the_package_requires() -> None:
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = json.loads((ROOT / "sbom.cdx.json").read_text())
    described = parts["metadata"]["component"]
    assert (described["name"], described["version"]) == (project["name"], project["version"])
    assert [part["properties"][0]["value"] for part in parts["components"]] == project["dependencies"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}" in citation
