"""A copy of the folder in which a script is started: what a run writes there meets no other run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_LARGE = 4 * 2**20
"""Files above it are not copied, but linked: data, mostly."""
_ENTRIES = 3000
"""How many files and folders are looked at; the rest is linked, folder by folder."""


def working_copy(source: Path, target: Path) -> Path:
    """Copy a folder: small files are copied, large ones and hidden folders linked."""
    left = [_ENTRIES]
    _mirror(source.absolute(), target, left, target.absolute())
    return target


def _mirror(source: Path, target: Path, left: list[int], root: Path) -> None:
    target.mkdir(parents=True)
    for entry in os.scandir(source):
        left[0] -= 1
        there = target / entry.name
        if root.is_relative_to(Path(entry.path)):
            continue  # the copy itself, where it lies in what is copied
        if entry.is_dir(follow_symlinks=False) and left[0] > 0 and not entry.name.startswith("."):
            _mirror(Path(entry.path), there, left, root)
        elif entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _LARGE:
            shutil.copy2(entry.path, there)
        else:
            there.symlink_to(os.path.abspath(entry.path))
