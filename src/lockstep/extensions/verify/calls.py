"""Trace of calls to torch's functions in one update, to find the first line where two processes differ."""

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
from lockstep.extensions.verify.settings import is_user_code, short, stack
from lockstep.extensions.verify.watch import Watch

TRACE = "calls"
"""Override that traces the calls in an update, for example ``calls 3`` in update 3."""

BEFORE_TRAINING = -1
"""Number in place of that of an update, to trace the calls before the first step's."""

_MAX_CALLS = 5000
_ROUNDING = 1e-9
"""The largest difference of two results that counts as rounding."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SYNCHRONIZES = tuple(
    _TORCH + folder for folder in ("distributed", "nn" + os.sep + "parallel", "optim", "nn" + os.sep + "utils")
)
"""Folders of torch whose functions behave differently on several ranks, or work on averaged gradients."""
_FORWARD = {"forward", "_run_ddp_forward", "_fn"}
"""Functions of wrappers that call the user's module."""


class Calls:
    """Recorder of the calls to torch's functions in one update, each with name, line and sums of the result.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        words = [word.split() for word in watch.settings.overrides]
        self._update = next((int(rest[0]) for name, *rest in words if name == TRACE), None)
        self._remaining = _MAX_CALLS

    def record(self, name: str, result: object) -> None:
        """Record a call of the function ``name`` and its ``result``, if the current update is traced.

        In the event, "changes" is True for a call that changes a tensor in place without autograd, and "late" for these
        calls and for others without autograd after the backward.
        """
        # most calls are of updates that are not traced: that is checked first
        if self._update != (self.watch.updates if self.watch.is_training else BEFORE_TRAINING) or self.watch.in_loader:
            return
        if self.watch.collates or not self._remaining or not isinstance(result, Tensor):
            return
        has_grad = torch.is_grad_enabled() and result.requires_grad
        # such as an update of weights, or of gradients after the backward
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        changes = is_in_place and result.dim() > 0 and not has_grad
        is_late = changes or (self.watch.backwards > 0 and not has_grad)
        if not (is_late or torch.is_grad_enabled()):
            return
        where = _line(sys._getframe(2))
        if where and result.dtype.is_floating_point and (changes or type(result) is not torch.nn.Parameter):
            self._remaining -= 1
            values = result.detach().double()
            # the sum of sizes is the scale against which rounding is judged
            sums = [values.sum().item(), values.abs().sum().item()]
            found = {"sums": sums, "shape": list(result.shape), "stack": stack() if changes else []}
            self.watch.journal.record("call", name=name, where=where, late=is_late, changes=changes, **found)


def first_other_line(calls: Sequence[Event], others: Sequence[Event]) -> str:
    """Return the line of the first call in which two processes differ, in the call itself or in its result.

    Returns:
        The line as ``file:line``; "" if all calls agree.
    """
    for own, other in zip_longest(calls, others):
        if own is None or other is None:
            return str((own or other)["where"])
        if any(own[key] != other[key] for key in ("name", "where", "shape")):
            return str(own["where"])
        if not _has_same_result(own, other):
            return str(own["where"])
    return ""


def first_new_line(calls: Sequence[Event], others: Sequence[Event]) -> str:
    """Return the line of the first call whose result no call in ``others`` has, whatever their lines and order are.

    Returns:
        The line as ``file:line``; "" if there is no such call.
    """
    for own in calls:
        if not any(own["shape"] == other["shape"] and _has_same_result(own, other) for other in others):
            return str(own["where"])
    return ""


def _has_same_result(own: Event, other: Event) -> bool:
    """Return True if the results of two calls have the same sums, up to rounding."""
    for a, b in zip(own["sums"], other["sums"], strict=True):
        both_nan = math.isnan(a) and math.isnan(b)
        # infinite values are equal, but their difference is NaN
        if not (both_nan or a == b or abs(a - b) <= _ROUNDING * own["sums"][1]):
            return False
    return True


def _line(frame: FrameType | None) -> str:
    """Return the line of user code that led to a call, or "" if torch made the call to synchronize ranks."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return f"{short(file)}:{frame.f_lineno}"
        if file.startswith(_SYNCHRONIZES) and frame.f_code.co_name not in _FORWARD:
            return ""
        frame = frame.f_back
    return ""
