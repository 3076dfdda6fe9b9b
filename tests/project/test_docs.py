"""All pages: links lead somewhere, code blocks are Python or shell, names of the source that they cite are there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.guards.source import house, parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lockstep"
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXTENSIONS = sorted(str(page.parent.relative_to(ROOT)) for page in PACKAGE.glob("extensions/*/__init__.py"))
PROSE = re.compile(r"```.*?```", re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def anchors_of(text: str) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", PROSE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(text: str, folder: Path) -> list[str]:
    """Targets of links and pictures that are not there: files, and headings in pages."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE.sub("", text)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (folder / path).resolve()
        there = file.is_relative_to(ROOT) and file.exists()
        if not there or (anchor and anchor not in anchors_of(file.read_text() if path else text)):
            broken.append(target)
    return broken


def placeholders(text: str) -> list[str]:
    """Words in capitals that stand alone on a line: a table that was to come."""
    return re.findall(r"^[A-Z]{4,}\.?$", PROSE.sub("", text), re.MULTILINE)


def tree_of(file: Path) -> ast.Module:
    return parsed(file.read_text(), str(file))


@lru_cache
def names_of(file: Path) -> set[str]:
    return names_in(tree_of(file))


def names_in(tree: ast.Module) -> set[str]:
    """Functions, classes, their methods and attributes, and constants, as `name` or `Class.name`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{name}" for name in names_in(ast.Module(node.body, [])))}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def cited(text: str) -> Iterator[tuple[str, str]]:
    """File and name of each citation: `loop/fit.py: FitLoop.run`, or `loop/fit.py` alone."""
    yield from re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PROSE.sub("", text))


def not_there(text: str) -> list[str]:
    """Citations of files and names that the source does not have."""
    wrong = []
    for path, name in cited(text):
        file = next((file for file in (PACKAGE / path, ROOT / path) if file.is_file()), None)
        if file is None or (name and name not in names_of(file)):
            wrong.append(f"{path}: {name}" if name else path)
    return wrong


# -- the pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(text_of(page), (ROOT / page).parent) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_placeholder(page: str) -> None:
    """docs/balance.md said TABLE where its measurements were to come."""
    assert placeholders(text_of(page)) == []


def test_a_placeholder_is_found() -> None:
    assert placeholders("Costs:\n\nTABLE\n\n```\nNOTHING\n```\nA TABLE of it.\n") == ["TABLE"]


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), ["README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            targets = re.findall(r"\]\(([^)#\s]+\.md)", text_of(page))
            found = [(ROOT / page).parent.joinpath(target).resolve() for target in targets if "://" not in target]
            todo += [str(file.relative_to(ROOT)) for file in found]
    assert set(PAGES) - reached == set()


@pytest.mark.parametrize("folder", EXTENSIONS)
def test_the_page_of_an_extension_names_its_files_and_links_to_what_is_there(folder: str) -> None:
    text = text_of(f"{folder}/README.md")
    assert broken_links(text, ROOT / folder) == []
    files = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}
    assert named == {file for file in files if not file.endswith("__init__.py")}


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_can_be_read(page: str) -> None:
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
        assert language in ("python", "bash", "yaml", "toml", "text", ""), language
        if language == "python":
            compile(code, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "bash":
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_the_architecture_page_cites_what_is_there() -> None:
    text = text_of("docs/architecture.md")
    assert len({path for path, name in cited(text) if name}) > 25
    assert not_there(text) == []


def test_short_names_on_the_architecture_page_are_there() -> None:
    """`Class.name` without a file, after the file was named."""
    text = text_of("docs/architecture.md")
    sources = house().values()
    everything = set().union(*(names_in(source.tree) for source in sources))
    attributes = {node.attr for source in sources for node in source.nodes if isinstance(node, ast.Attribute)}
    for name in re.findall(r"`([A-Z]\w+\.\w+)`", text):
        owner, _, attribute = name.partition(".")
        assert name in everything or (owner in everything and attribute in attributes), name


def strangers(sketch: str) -> list[str]:
    """Lines of a sketch that its function does not have in this order. The first line names the function."""
    path, _, name = sketch.splitlines()[0].removeprefix("# ").partition(": ")
    tree = ast.parse((PACKAGE / path).read_text())
    owner, _, method = name.partition(".")
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == method)
    lines = iter(line.strip() for line in ast.unparse(function).splitlines())
    return [line for line in sketch.splitlines()[1:] if line.strip() not in lines]


def test_sketches_on_the_architecture_page_are_the_code() -> None:
    sketches = re.findall(r"^```python\n(.*?)^```", text_of("docs/architecture.md"), re.DOTALL | re.MULTILINE)
    assert sketches
    assert [line for sketch in sketches for line in strangers(sketch)] == []


def test_a_sketch_of_other_code_is_caught() -> None:
    head = "# loop/step.py: Automatic.window\n"
    assert strangers(f"{head}self.end(shown, micro_batch)\nyield\n") == []
    assert strangers(f"{head}yield\nself.end(shown, micro_batch)\n") == ["self.end(shown, micro_batch)"]


def test_the_architecture_page_can_be_read_in_half_an_hour() -> None:
    assert len(text_of("docs/architecture.md").split()) <= 4500


def test_the_glossary_is_short_and_each_word_stands_once() -> None:
    words = re.findall(r"^\| ([\w\- ]+) \|", text_of("docs/architecture.md").partition("## Glossary")[2], re.MULTILINE)
    words.remove("word")
    assert 15 <= len(words) <= 25
    assert len(set(words)) == len(words)


# -- what they catch -----------------------------------------------------------------------------------------


def test_a_broken_link_is_caught() -> None:
    text = "# One thing\n[a](docs/nothing.md) [b](docs/run.md#no-such) [c](#one-thing) [d](LICENSE) ![e](docs/no.png)"
    assert broken_links(text, ROOT) == ["docs/nothing.md", "docs/run.md#no-such", "docs/no.png"]


def test_a_name_that_is_gone_is_caught() -> None:
    text = "`loop/fit.py: FitLoop.run` `loop/fit.py: FitLoop.ran` `loop/gone.py` `loop/hooks.py: NAMES` `loop/fit.py`"
    assert not_there(text) == ["loop/fit.py: FitLoop.ran", "loop/gone.py"]
