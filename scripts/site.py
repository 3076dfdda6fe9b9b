"""Writes what the site is built of into build/: the pages, the examples, and a reference of all public names.

    python -m scripts.site

README.md is the first page. Links from one page to another stay; those to files that are no page (scripts, tests) lead
to nothing in a site, and become text. The reference has a page for each module whose names users import; mkdocstrings
fills it from the docstrings of a copy of the package, in which headings and roles have the form that it knows.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[1]
PAGES = PROJECT / "build" / "pages"
SOURCE = PROJECT / "build" / "source"
SPELLINGS = (
    (re.compile(r"^( +)Example:$", re.MULTILINE), r"\1Examples:"),
    (re.compile(r"^( +)Example::$", re.MULTILINE), r"\1**Example**"),  # the indented lines below it are code
    (re.compile(r":(?:attr|class|func|meth|mod):`[~.]?([^`]+)`"), r"`\1`"),
)
"""What the docstrings write as editors know it, and how mkdocstrings knows it."""
LINK = re.compile(r"(!?)\[([^\]\n]+(?:\n[^\]\n]+)?)\]\(([^)\s]+)\)")  # its text may be broken into two lines

REFERENCE = (
    "lockstep",
    "lockstep.strategies",
    "lockstep.callbacks",
    "lockstep.loggers",
    "lockstep.profilers",
    "lockstep.tuner",
    "lockstep.utilities",
    "lockstep.engines.ddp.hooks",
    "lockstep.testing",
)
"""Modules whose names users import."""


def main() -> None:
    """Write all of it anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for source, target in sorted(pages().items()):
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            target.write_text(f"# {source.name}\n\n```python\n{source.read_text()}```\n")
        elif source.suffix == ".md":
            target.write_text(linked(source, target))
        else:
            shutil.copy(source, target)
    (PAGES / "llms.txt").write_text(for_programs())
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(PROJECT / "src", SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        for written, known in SPELLINGS:
            text = written.sub(known, text)
        file.write_text(text)
    shown: dict[str, str] = {}
    for module in REFERENCE:
        target = PAGES / "reference" / f"{module}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text("\n".join(reference(module, shown)))


def pages() -> dict[Path, Path]:
    """Where each file of the project stands in the site."""
    found = {PROJECT / "README.md": PAGES / "index.md", PROJECT / "CHANGELOG.md": PAGES / "CHANGELOG.md"}
    for file in (PROJECT / "docs").iterdir():
        if file.suffix in (".md", ".png", ".svg", ".js"):
            found[file] = PAGES / "docs" / file.name
    for file in (PROJECT / "examples").glob("*.py"):
        found[file] = PAGES / "examples" / f"{file.stem}.md"
    found[PROJECT / "LICENSE"] = PAGES / "LICENSE"
    return found


def for_programs() -> str:
    """Return llms.txt: the rules of AGENTS.md, and each page with its first sentence, for programs that read the site.

    The format is that of llmstxt.org: a title, a summary and lists of links.
    """
    rules = (PROJECT / "AGENTS.md").read_text().partition("\n\n")[2]
    lines = ["# lockstep", "", "> A trainer for PyTorch with the API of Lightning 2.x.", "", rules, "## Pages", ""]
    for source, target in sorted(pages().items()):
        if source.suffix == ".md":
            title, _, rest = source.read_text().partition("\n")
            text = re.sub(r"^(#.*|!\[.*|<!--.*|\|.*)$", "", rest, flags=re.MULTILINE).strip().partition("\n\n")[0]
            sentence = re.split(r"(?<=\.)\s", LINK.sub(r"\2", " ".join(text.split())))[0]
            page = target.relative_to(PAGES).with_suffix(".html").as_posix()
            lines.append(f"- [{title.removeprefix('# ')}]({page}): {sentence}")
    return "\n".join(lines) + "\n"


def linked(source: Path, target: Path) -> str:
    """A page whose links lead to where the others stand."""
    there = pages()

    def moved(link: re.Match[str]) -> str:
        mark, text, where = link.groups()
        path, _, anchor = where.partition("#")
        if "://" in where or not path:
            return link[0]
        file = (source.parent / path).resolve()
        if file not in there:
            return text
        to = Path(*[".."] * len(target.parent.relative_to(PAGES).parts), *there[file].relative_to(PAGES).parts)
        return f"{mark}[{text}]({to.as_posix()}{'#' if anchor else ''}{anchor})"

    return LINK.sub(moved, source.read_text())


def reference(module: str, shown: dict[str, str]) -> Iterator[str]:
    """The page of a module: each public name, by the file that it is defined in.

    Args:
        module: whose names users import.
        shown: by name of the file's, the module on whose page it stands already; this page's are added.
    """
    found = import_module(module)
    yield f"# {module}\n"
    if found.__doc__:
        yield f"{found.__doc__.strip()}\n"
    for name in public(found):
        value = getattr(found, name)
        where = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if where in shown:
            yield f"## {name}\n\n[{shown[where]}.{name}]({shown[where]}.md)\n"
        elif where.startswith("lockstep.") and hasattr(value, "__qualname__"):
            shown[where] = module
            yield f"::: {where}\n    options: {{heading_level: 2}}\n"
        else:
            yield f"## {name}\n\n`{module}.{name}`\n"


def public(module: ModuleType) -> list[str]:
    """The names that a module gives to users."""
    listed = getattr(module, "__all__", None)
    own = [
        name for name in vars(module) if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    ]
    return sorted(own if listed is None else listed)


if __name__ == "__main__":
    main()
