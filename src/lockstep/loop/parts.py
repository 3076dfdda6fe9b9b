"""What the parts of a micro-batch, or several ranks, have logged, put together as if one step, or one rank, had."""

from __future__ import annotations

import math
from typing import Any

from lockstep.loop.logged_entry import Entry, Key
from lockstep.loop.logged_rows import extreme, joined
from lockstep.loop.logging import LogCollector


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
                value, weight = joined_values(entry.op, before, weighed, value, weight), weighed + weight
            kept[name] = (entry, value, weight)
            entry.step_fresh = 0

    def show(self) -> None:
        """The micro-batch at hand is over: its values are those of all its parts."""
        results = self._results
        for entry, value, weight in self._kept.pop(results.micro_batch, {}).values():
            entry.last, entry.last_weight, entry.step_fresh = value, weight, results.micro_batch

    def show_newest(self) -> int:
        """Let names have the values of the newest micro-batch that was played, ended or not; gives its number."""
        newest = self._results.micro_batch
        for number in sorted(self._kept):
            newest = max(newest, number)
            for entry, value, weight in self._kept[number].values():
                entry.last, entry.last_weight, entry.step_fresh = value, weight, number
        return newest


def merged(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What several ranks had collected in an epoch, as one of them goes on with it; see `LogCollector.state_dict`."""
    found: dict[Key, dict[str, Any]] = {}
    for saved in (each for part in parts for each in part):
        key: Any = tuple(saved["key"])
        if key not in found:
            found[key] = dict(saved)
            continue
        first, op = found[key], Entry(key, tuple(saved["options"])).op
        first["total"], first["weight"] = joined(op, [(each["total"], each["weight"]) for each in (first, saved)])
        first["fresh"] = first["fresh"] or saved["fresh"]
        first.update(_newest_step(op, first, saved))
    return list(found.values())


def _newest_step(op: str, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The newest value of a step that two ranks had logged; of one micro-batch, that of both."""
    ages = [math.inf if saved.get("age") is None else saved["age"] for saved in (one, other)]
    if ages[0] != ages[1] or ages[0] == math.inf:
        newest = one if ages[0] <= ages[1] else other
        return {key: newest[key] for key in ("last", "last_weight", "age") if key in newest}
    weights = one["last_weight"], other["last_weight"]
    last = joined_values(op, one["last"], weights[0], other["last"], weights[1])
    return {"last": last, "last_weight": sum(weights), "age": one["age"]}


def joined_values(op: str, one: Any, its_weight: float, other: Any, others_weight: float) -> Any:
    """Two reduced values as one; weights are those of means."""
    if op == "mean":
        return (one * its_weight + other * others_weight) / (its_weight + others_weight)
    if op == "sum":
        return one + other
    return extreme(op, one, other)
