"""A reader for users' YAML files, which returns plain values."""

from __future__ import annotations

import os
from typing import Any


def read(path: str | os.PathLike[str]) -> Any:
    """Read a YAML file and return its content as plain values.

    Raises:
        ModuleNotFoundError: the package `yaml` is not installed.
        OSError: the file cannot be read.
        ValueError: it is not YAML.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        with open(path, "rb") as file:
            return yaml.safe_load(file)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"it is not YAML ({reason[:300]})" if reason else "it is nested too deeply") from error
