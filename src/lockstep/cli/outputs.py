"""Files that a command is asked to write: whether they can be written is known before its work begins."""

from __future__ import annotations

import os
from importlib.util import find_spec

from lockstep.ground.errors import MisconfigurationException, missing_extra


def check_file(asked: str, path: str) -> None:
    """Refuse a file that cannot be written.

    Args:
        asked: the command and its option, for the error.
        path: of the file.

    Raises:
        MisconfigurationException: its folder is not there, or nothing can be written there.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        why = "it is a folder: give the name of a file"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder!r}: make it, or give another name"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        why = "it cannot be written there: give another name"
    else:
        return
    raise MisconfigurationException(f"{asked} {path}: {why}")


def check_picture(asked: str, path: str) -> None:
    """Refuse a picture that cannot be drawn or written; arguments as of :func:`check_file`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        MisconfigurationException: as of :func:`check_file`.
    """
    if find_spec("matplotlib") is None:
        raise missing_extra("matplotlib", "plot", asked)
    check_file(asked, path)
