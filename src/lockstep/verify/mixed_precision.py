"""Leaves out the smaller types that a wrapper calculates or reduces in: what they round is no difference of ranks."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from lockstep.verify.imports import Change
from lockstep.verify.watch import Watch, put

NOTE = "mixed precision"
"""The kind of event that is noted where a script has asked for smaller types."""

_HOME = "torch.distributed.fsdp"
_POLICIES = ("MixedPrecisionPolicy", "MixedPrecision")
_TYPES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def changes(watch: Watch) -> dict[str, Change]:
    """What is changed in torch's module of sharded wrappers."""
    return {_HOME: functools.partial(_change, watch)}


def _change(watch: Watch, module: ModuleType) -> None:
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
