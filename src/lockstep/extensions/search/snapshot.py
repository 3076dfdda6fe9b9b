"""Copies of the code that git tracks, so that a waiting trial will run the code that was submitted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class Copied:
    """Command that runs the copied code instead of the original.

    Attributes:
        words: words of the command.
        folder: working directory of the command.
        python_path: value for PYTHONPATH; None leaves it unchanged.
    """

    words: list[str]
    folder: str
    python_path: str | None


def copy(target: Path, words: Sequence[str], folder: str, python_path: str) -> Copied:
    """Copy the current files that git tracks, and return a command that runs the copy.

    A script keeps its working directory, where its data are. A module (``-m``) is imported from the working directory,
    so it runs in the copy of this folder. Entries of PYTHONPATH in the work tree point to the copy.

    Args:
        target: folder of the copy; it is replaced.
        words: words of a Python command: ``[python, options, script or -m module, arguments]``.
        folder: working directory of the command.
        python_path: the current PYTHONPATH.

    Raises:
        MisconfigurationException: git is missing, the script is not in a work tree, or git does not track it.
    """
    # Options of Python precede the script or -m; -X and -W have a value.
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in ("-X", "-W") else 1
    if at == len(words):
        raise MisconfigurationException(f"snapshot=True: there is no script to copy in {' '.join(words)!r}")
    is_module = words[at] == "-m"
    script = os.path.realpath(folder if is_module else os.path.join(folder, words[at]))
    top = Path(_git(script if is_module else os.path.dirname(script), "rev-parse", "--show-toplevel").strip())
    top = Path(os.path.realpath(top))
    names = [name for name in _git(str(top), "ls-files", "-z", "--recurse-submodules").split("\0") if name]
    if not is_module and os.path.relpath(script, top) not in names:
        raise MisconfigurationException(
            f"snapshot=True copies the files that git tracks, but git does not track {script!r}. Run git add for it, "
            "or omit snapshot=True"
        )
    shutil.rmtree(target, ignore_errors=True)
    for name in names:
        source, copied = top / name, target / name
        # Git also lists tracked files that were removed from the work tree.
        if source.is_symlink() or source.is_file():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied, follow_symlinks=False)
    moved = [_moved(entry, top, target, folder) for entry in python_path.split(os.pathsep) if entry]
    where = _moved(folder, top, target, folder) if is_module else folder
    new = list(words) if is_module else [*words[:at], _moved(script, top, target, folder), *words[at + 1 :]]
    return Copied(new, where, os.pathsep.join(moved) or None)


def _moved(path: str, top: Path, target: Path, folder: str) -> str:
    """Map a path in git's work tree to the same file in the copy. Make any other path absolute."""
    real = os.path.realpath(os.path.join(folder, path))
    if real != str(top) and not real.startswith(f"{top}{os.sep}"):
        return os.path.join(folder, path)
    return os.path.normpath(target / os.path.relpath(real, top))


def _git(folder: str, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, errors="surrogateescape")
    except FileNotFoundError:
        raise MisconfigurationException(
            "snapshot=True copies the files that git tracks, but git is not on PATH. Install git, or omit snapshot=True"
        ) from None
    if done.returncode:
        raise MisconfigurationException(
            f"snapshot=True copies the files that git tracks, but git {words[0]} failed in {folder!r}: "
            f"{done.stderr.strip()}"
        )
    return done.stdout
