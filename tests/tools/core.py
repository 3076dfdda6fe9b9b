"""A copy of lockstep without extensions, to run tests on.

python -m tests.tools.core FOLDER    # makes FOLDER/lockstep; put FOLDER first on PYTHONPATH
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from lockstep.ground.extensions import EXTENSIONS
from tests.guards.source import PACKAGE


def copy_without(folder: Path, extensions: Iterable[str] = EXTENSIONS) -> None:
    """Copy lockstep into a folder, without these extensions.

    Compiled files come along, since a copy keeps the times of its sources.
    """
    shutil.copytree(PACKAGE, folder / "lockstep")
    for name in extensions:
        shutil.rmtree(folder / "lockstep" / "extensions" / name, ignore_errors=True)  # somebody may have deleted it


if __name__ == "__main__":
    copy_without(Path(sys.argv[1]))
