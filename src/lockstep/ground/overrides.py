"""What a method is once everything around it is taken away."""

from __future__ import annotations

from functools import partial
from typing import Any


def innermost(method: Any) -> Any:
    """The function behind a bound method, and behind whatever wraps it."""
    while True:
        if isinstance(method, partial):
            method = method.func
        elif getattr(method, "_mock_wraps", None) is not None:
            method = method._mock_wraps
        elif hasattr(method, "__func__"):
            method = method.__func__
        elif hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        else:
            return method
