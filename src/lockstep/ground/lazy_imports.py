"""The names of a face, imported when somebody asks for them: a face costs what is used of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def late(face: str, files: Mapping[str, str], name: str) -> Any:
    """What a name of a face stands for, for the face's ``__getattr__``; the face keeps it.

    Args:
        face: the ``__name__`` of the face.
        files: by name the file where it is written, as seen from the face: ``"base"``, or ``".tuner.lr_finder"`` for
            one beside the face.
        name: that is asked for.

    Raises:
        AttributeError: it is no name of the face.
    """
    if name not in files:
        raise AttributeError(f"module {face!r} has no attribute {name!r}")
    value = getattr(import_module(f".{files[name]}", face), name)
    setattr(sys.modules[face], name, value)
    return value
