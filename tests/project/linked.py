"""Environments of links: an interpreter finds lockstep, what it requires, what some of its extras bring, and no more.

One is made of the environment of the tests in a quarter of a second; processes that it starts see no more than it does.
"""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:  # with the package that pytest brings there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def linked_environment(folder: Path, *extras: str) -> Path:
    """An interpreter for lockstep with some of its extras, as ``pip install ".[extras]"`` makes it.

    Args:
        folder: that it is made in.
        extras: of pyproject.toml.
    """
    venv.create(folder, symlinks=True)
    asked = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in (ROOT / "src" / "lockstep", *_files(brought(asked))):
        if not (packages / found.name).is_symlink():  # the folder of a namespace, of another distribution, too
            (packages / found.name).symlink_to(found)
    return folder / "bin" / "python"


def brought(asked: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions that an installer takes for some requirements, by name.

    Args:
        asked: requirements, as pyproject.toml has them.
    """
    found: dict[str, metadata.Distribution] = {}
    todo = [(Requirement(line), "") for line in asked]
    seen = set()
    while todo:
        requirement, extra = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *requirement.extras} - {one for known, one in seen if known == name}:
            seen.add((name, wanted))
            found[name] = metadata.distribution(name)
            todo += [(Requirement(line), wanted) for line in found[name].requires or ()]
    return found


def _files(distributions: dict[str, metadata.Distribution]) -> Iterator[Path]:
    """What they have directly in the folder of packages."""
    for distribution in distributions.values():
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()}
        yield from (Path(str(distribution.locate_file(top))) for top in sorted(tops - {"..", "__pycache__"}))
