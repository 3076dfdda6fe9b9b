"""The site: each page is in it, links lead to pages of it, and the reference has every public name once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import site, site_versions

ROOT = Path(__file__).resolve().parents[2]


def test_each_page_and_module_is_in_the_navigation() -> None:
    listed = set(re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {page.relative_to(site.PAGES).as_posix() for page in site.pages().values() if page.suffix == ".md"}
    assert listed == made | {f"reference/{module}.md" for module in site.REFERENCE}


def test_links_lead_to_where_pages_stand_and_those_to_other_files_are_text() -> None:
    source, target = ROOT / "docs" / "results.md", site.PAGES / "docs" / "results.md"
    first = site.linked(ROOT / "README.md", site.PAGES / "index.md")
    assert "(docs/results.md)" in first
    assert "(examples/digits.md)" in first
    text = site.linked(source, target)
    assert "(../docs/failures.md)" in text
    assert "README.md" not in text
    leads_out = re.findall(r"\]\((\.\./(?:src|tests|scripts|benchmarks)[^)]*)\)", text)
    assert leads_out == []


def test_a_name_of_two_modules_is_described_once() -> None:
    shown: dict[str, str] = {}
    pages = {module: "\n".join(site.reference(module, shown)) for module in ("lockstep", "lockstep.callbacks")}
    assert pages["lockstep"].count("::: lockstep.callbacks.base.Callback\n") == 1
    assert "[lockstep.Callback](lockstep.md)" in pages["lockstep.callbacks"]
    assert "::: lockstep.callbacks.model_checkpoint.ModelCheckpoint\n" in pages["lockstep.callbacks"]


def test_the_first_page_leads_to_the_newest_release_and_before_there_is_one_to_main(tmp_path: Path) -> None:
    for version in ("main", "sites/0.2.0", "sites/0.10.0"):
        (tmp_path / version).mkdir(parents=True)
        (tmp_path / version / "index.html").write_text(version)
    public, releases = tmp_path / "public", tmp_path / "sites"
    for folder, newest in ((releases, "0.10.0"), (tmp_path / "none", "main")):
        site_versions.arrange(public, tmp_path / "main", folder)
        listed = json.loads((public / "versions.json").read_text())
        assert [row["version"] for row in listed if row["aliases"]] == [newest]
        assert f'href="{newest}/index.html"' in (public / "index.html").read_text()
        assert {row["version"] for row in listed} == {path.parent.name for path in public.glob("*/index.html")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra docs: scripts/docs installs it")
def test_the_site_is_built_without_a_warning() -> None:
    site.main()
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Trainer" in (ROOT / "build/site/reference/lockstep.html").read_text()
