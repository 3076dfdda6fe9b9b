"""Leaves out the smaller types that a wrapper calculates or reduces in: what they round is no difference of ranks."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from lockstep.extensions.verify.watch import Watch, put

NOTE = "mixed precision"
"""The kind of event that is noted where a script has asked for smaller types."""

_POLICIES = ("MixedPrecisionPolicy", "MixedPrecision")
_TYPES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def leave_out(watch: Watch, module: ModuleType) -> None:
    """Have the policies of torch's module of sharded wrappers ask for nothing."""
    for name in _POLICIES:
        kind = getattr(module, name, None)
        if kind is not None:
            _leave_out(watch, name, kind)


def _leave_out(watch: Watch, name: str, kind: type) -> None:
    made = vars(kind)["__init__"]

    @functools.wraps(made)
    def init(policy: object, *args: Any, **kwargs: Any) -> None:
        made(policy, *args, **kwargs)
        asked = [each for each in _TYPES if getattr(policy, each, None) is not None]
        for each in asked:
            object.__setattr__(policy, each, None)  # a policy is frozen
        if asked:
            watch.journal.note(NOTE, name=name)

    put(kind, "__init__", init)
