"""What a step logs for the parts of a micro-batch, put together as if the step had run once on all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.loop.logged_rows import extreme
from lockstep.loop.logging import Entry, LogCollector


class StepParts:
    """An engine may run ``training_step`` several times for one micro-batch, each time on a part of its samples.

    What is logged for an epoch adds up by itself; of a step's values there is one for each part.

    Args:
        results: what the steps log into.
    """

    def __init__(self, results: LogCollector) -> None:
        self._results = results
        self._kept: dict[int, dict[str, tuple[Entry, Any, float]]] = {}  # micro-batch -> name -> entry, value, weight

    def keep(self) -> None:
        """A part is over: take what it has logged for its step."""
        results = self._results
        kept = self._kept.setdefault(results.micro_batch, {})
        for name, entry in (results.table or {}).items():
            if entry.step_fresh != results.micro_batch or not entry.last_weight:
                continue
            value, weight = entry.last, entry.last_weight
            if name in kept:
                _, before, weighed = kept[name]
                value, weight = _joined(entry.op, before, weighed, value, weight), weighed + weight
            kept[name] = (entry, value, weight)
            entry.step_fresh = 0

    def show(self) -> None:
        """The micro-batch at hand is over: its values are those of all its parts."""
        results = self._results
        for entry, value, weight in self._kept.pop(results.micro_batch, {}).values():
            entry.last, entry.last_weight, entry.step_fresh = value, weight, results.micro_batch


def _joined(op: str, one: Any, its_weight: float, other: Any, others_weight: float) -> Any:
    if op == "mean":
        return (one * its_weight + other * others_weight) / (its_weight + others_weight)
    if op == "sum":
        return one + other
    if isinstance(one, Tensor):
        return (torch.minimum if op == "min" else torch.maximum)(one, other)
    return extreme(op, one, other)
