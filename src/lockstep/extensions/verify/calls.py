"""Notes what torch's functions give in one update, to find the first line at which a rank computes something else."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from itertools import zip_longest
from types import FrameType

import torch
from torch import Tensor

from lockstep.extensions.verify.recordings import Event
from lockstep.extensions.verify.settings import is_users, short
from lockstep.extensions.verify.watch import Watch

WORD = "calls"
"""The override that asks for it: ``calls 3`` for the calls of update 3."""

LATE = "late-calls"
"""The same for the calls after a backward, those without gradients included: what is done to gradients."""

_MOST = 5000
"""Calls that are noted."""
_SAME = 1e-9
"""The largest difference of two results that is rounding."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SYNCHRONIZES = tuple(
    _TORCH + folder for folder in ("distributed", "nn" + os.sep + "parallel", "optim", "nn" + os.sep + "utils")
)
"""Parts of torch that do something else on several ranks than on one, or work on averaged gradients."""


class Calls:
    """Notes the name, the line and the result of each function of torch's that a step calls.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        words = [word.split() for word in watch.settings.overrides]
        found = [(name == LATE, int(rest[0])) for name, *rest in words if name in (WORD, LATE)]
        self._is_late, self._update = found[0] if found else (False, -1)
        self._left = _MOST

    def note(self, name: str, result: object) -> None:
        """Note a call that a step has made."""
        if self._update != self.watch.updates or not self.watch.is_training or self.watch.in_loader:
            return
        if self.watch.collates or not self._left or not isinstance(result, Tensor):
            return
        if not (self.watch.backwards if self._is_late else torch.is_grad_enabled()):
            return
        where = _line(sys._getframe(2))
        if where and result.dtype.is_floating_point and type(result) is not torch.nn.Parameter:
            self._left -= 1
            values = result.detach().double()
            sums = [values.sum().item(), values.abs().sum().item()]
            self.watch.journal.note("call", name=name, where=where, sums=sums, shape=list(result.shape))


def first_other_line(calls: Sequence[Event], others: Sequence[Event]) -> str:
    """The line of the first call that another process did not make, or with another result; "" for none."""
    for own, other in zip_longest(calls, others):
        if own is None or other is None:
            return str((own or other)["where"])
        if not _is_same(own, other):
            return str(own["where"])
    return ""


def _is_same(own: Event, other: Event) -> bool:
    if any(own[key] != other[key] for key in ("name", "where", "shape")):
        return False
    size = own["sums"][1]
    return all(_near(a, b, size) for a, b in zip(own["sums"], other["sums"], strict=True))


def _near(a: float, b: float, size: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= _SAME * size


def _line(frame: FrameType | None) -> str:
    """The user's line from which a function is called; "" where torch calls it to synchronize ranks."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{short(file)}:{frame.f_lineno}"
        if file.startswith(_SYNCHRONIZES) and frame.f_code.co_name not in _FORWARD:
            return ""
        frame = frame.f_back
    return ""


_FORWARD = {"forward", "_run_ddp_forward", "_fn"}
"""Functions of wrappers within which the user's own module is called."""
