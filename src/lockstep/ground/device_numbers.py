"""Numbers that a kind of device computes with: double precision, and what autocast takes."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def has_float64(kind: str) -> bool:
    """Whether a kind of device computes in double precision."""
    if kind in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=kind) + 1
    except (RuntimeError, TypeError, AssertionError):  # the last one: torch was built without such devices
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """The dtype in which sums are taken on a device: float64, or float32 where it has no such."""
    return torch.float64 if has_float64(device.type) else torch.float32


def has_autocast(kind: str, dtype: torch.dtype) -> bool:
    """Whether a kind of device has ``torch.autocast`` to a dtype."""
    if kind == "cuda" or not torch.amp.is_autocast_available(kind):
        return kind == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # by which torch says that it leaves autocast off
        try:
            torch.autocast(kind, dtype=dtype)
        except (UserWarning, RuntimeError):
            return False
    return True
