"""A study of Optuna's over a journal file that all nodes see: trials drawn by number, and told how they ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def start(search: Any, number: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Begin a trial, or go on with it."""
    raise NotImplementedError
