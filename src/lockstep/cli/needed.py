"""What the command line is made with: jsonargparse and what it brings; without it, the sentence that says so."""

from __future__ import annotations

from lockstep.ground.errors import missing_extra

try:
    import docstring_parser
    import jsonargparse
    import yaml  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise missing_extra(str(error.name or "jsonargparse"), "cli", "lockstep.cli") from None

__all__ = ["docstring_parser", "jsonargparse", "yaml"]
