"""Flags of the Trainer that stand in the environment, by Lightning's names: ``PL_TRAINER_MAX_EPOCHS=3``."""

from __future__ import annotations

import os
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def flags_of(
    given: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The flags that variables set and the script leaves at their defaults.

    Args:
        given: every flag as the script has it.
        defaults: every flag's default.
        environ: ``PL_TRAINER_`` and the flag in capitals; a value is read as Python writes it, or else is text.

    Example:
        >>> flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": "2"})
        {'devices': 2}
    """
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        value: Any = environ.get(f"PL_TRAINER_{name.upper()}", "")
        if value != "" and given[name] == default:
            with suppress(ValueError, SyntaxError):  # plain text, such as cpu
                value = literal_eval(value)
            found[name] = value
    return found
