"""Files that a command is asked to write: whether they can be written is known before its work begins."""

from __future__ import annotations

import os

from lockstep.ground.errors import MisconfigurationException


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
