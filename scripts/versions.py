"""Prints constraints for pip by which an environment has other versions than those of constraints.txt.

    python scripts/versions.py oldest|newest|torch-VERSION

oldest and newest: what pyproject.toml allows. torch stays as constraints.txt has it, and so does Lightning, with which
the tests compare to the letter. Tools of the tests (the extras test and bench) are the newest.

torch-VERSION: that torch, and all else as in constraints.txt. What belongs to one torch is left open.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
REQUIREMENT = re.compile(r'"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)')
KEPT = ("torch", "torchvision", "lightning", "pytorch-lightning")
"""Packages whose versions are those of constraints.txt."""
OF_THE_BUILD = ("hatchling",)
BY_TORCH = ("torch", "torchvision", "setuptools")
"""Packages whose versions another torch chooses."""


def lowest() -> dict[str, str]:
    """By package the lowest version that every requirement on it allows."""
    found: dict[str, str] = {}
    of_users, _, _ = (PROJECT / "pyproject.toml").read_text().partition("\ntest = [")
    for name, version in REQUIREMENT.findall(of_users):
        if name not in (*KEPT, *OF_THE_BUILD) and _key(version) > _key(found.get(name, "0")):
            found[name] = version
    return found


def kept() -> list[str]:
    """The lines of constraints.txt for what stays as it is."""
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in KEPT]


def constraints(versions: str) -> list[str]:
    """The lines of a file for pip's option -c.

    Raises:
        SystemExit: none of the three was asked for.
    """
    name, _, version = versions.partition("-")
    if name == "torch" and version:
        lines = (PROJECT / "constraints.txt").read_text().splitlines()
        return [f"torch=={version}", *(line for line in lines if line.partition("==")[0] not in BY_TORCH)]
    if versions not in ("oldest", "newest"):
        raise SystemExit(f"{versions or 'nothing'}: give oldest, newest or torch-VERSION")
    return [*kept(), *(f"{name}=={version}" for name, version in sorted(lowest().items()) if versions == "oldest")]


def _key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    print("\n".join(constraints(*sys.argv[1:2] or [""])))
