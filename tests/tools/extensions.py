"""For lists of cases: which extensions are there, and whose a name is. Tests are marked ``extension("name")``."""

from __future__ import annotations

import pytest

from lockstep.ground.extensions import EXTENSIONS as EXTENSIONS
from lockstep.ground.extensions import is_there as is_there


def owner(name: str) -> str | None:
    """Return the extension that has a public name or a path below lockstep; None for what the core has."""
    for extension, rows in EXTENSIONS.items():
        paths = (*rows.paths, f"extensions.{extension}")
        if name in rows.names or any(name == path or name.startswith(f"{path}.") for path in paths):
            return extension
    return None


def needs(*names: str) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs these names or paths, as ``"callbacks.SpikeDetection"``."""
    owners = {owner(name) for name in names} - {None}
    return [pytest.mark.extension(*owners)] if owners else []
