"""Table of a search's trials as text, CSV or JSON, with the best trial by a metric."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.extensions.search.search import COMPLETED, PRUNED, RUNNING, Status
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.text_table import padded

WIDEST = 24
"""Number of characters, at most, in a cell."""
MOST_METRICS = 6
"""Number of metrics, at most, that the table shows by default."""
LARGEST = ("acc", "auc", "f1", "score", "precision", "recall", "reward", "iou", "bleu", "r2", "map", "psnr", "ssim")
"""Parts of the names of metrics whose largest value is the best."""


@dataclass(frozen=True)
class Order:
    """The metric by which trials are compared, and the direction: largest or smallest value first."""

    metric: str
    largest: bool

    def of(self, status: Status) -> float | None:
        """Return the trial's value of the metric; None if it is missing or not a number."""
        value = status.metrics.get(self.metric)
        return None if not isinstance(value, (int, float)) or math.isnan(value) else float(value)

    def key(self, status: Status) -> float:
        """Return a sort key that orders the best trial first."""
        value = self.of(status)
        if value is None:
            return math.inf
        return -value if self.largest else value

    def lines(self, statuses: Iterable[Status]) -> list[str]:
        """Return a list with a line about the best of the trials that have ended; empty if none has ended."""
        ended = [each for each in statuses if each.state in (COMPLETED, PRUNED) and self.of(each) is not None]
        if not ended:
            return []
        best, which = min(ended, key=self.key), "largest" if self.largest else "smallest"
        return [f"best: trial {best.trial.number}, {self.metric} {_cell(self.of(best))} (the {which})"]


def order_by(statuses: Sequence[Status], metric: str | None, largest: bool | None) -> Order | None:
    """Choose the metric by which trials are compared; return None if there is no obvious choice.

    Args:
        statuses: states of the trials.
        metric: requested metric; None: ``val_loss``, ``value``, another validation metric, or the only one.
        largest: whether the largest value is the best; None: determined by the name of the metric.

    Raises:
        MisconfigurationException: no trial has logged the requested metric.
    """
    names = names_in(status.metrics for status in statuses)
    if metric is None:
        usual = sorted(names, key=lambda name: (name not in ("val_loss", "value"), not name.startswith("val")))
        if not usual or (len(names) > 1 and not usual[0].startswith("val")):
            return None
        metric = usual[0]
    elif metric not in names:
        there = ", ".join(names) or "nothing yet"
        raise MisconfigurationException(f"--sort {metric}: no trial has logged this metric. Logged metrics: {there}")
    return Order(metric, any(part in metric.lower() for part in LARGEST) if largest is None else largest)


def names_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all rows, each once, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between rows, or all keys if there is only one row."""
    names = names_in(rows)
    if len(rows) < 2:
        return names
    return [name for name in names if len({json.dumps(row.get(name)) for row in rows}) > 1]


def seconds(status: Status) -> float:
    """Return how many seconds a trial has run in all its starts, according to its events."""
    last = status.history.last
    if last is None:
        return 0.0
    until = last.last
    if status.state == RUNNING:
        until = time.time()
    elif last.end is None:
        until = float(status.result.get("time", 0.0))
    return status.history.seconds + max(0.0, until - last.last)


# -- text ----------------------------------------------------------------------------------------------------


def text(name: str, statuses: Sequence[Status], order: Order | None, everything: bool = False) -> str:
    """Format the trials as text: a line for each trial, and a line that names the best one.

    Args:
        name: name of the search.
        statuses: states of the trials, in the order of the table.
        order: the metric that determines the best trial; None if no trial is to be named the best.
        everything: show all metrics, and hyperparameters that are the same in all trials.
    """
    counts = Counter(status.state for status in statuses)
    heading = f"{name}: {len(statuses)} trial(s): {', '.join(f'{count} {state}' for state, count in counts.items())}"
    drawn = [status.values for status in statuses if status.values]
    values, metrics = names_in(drawn) if everything else differing(drawn), names_in(each.metrics for each in statuses)
    if order is not None:
        metrics.sort(key=lambda name: name != order.metric)
    shown = metrics if everything else metrics[:MOST_METRICS]
    heads, cells, left_aligned = zip(*_columns(statuses, values, shown), strict=True)
    rows = [[*map(_cell, heads)], *([cell(status) for cell in cells] for status in statuses)]
    right = [number for number, is_left in enumerate(left_aligned) if not is_left]
    lines = [heading, *("  ".join(row).rstrip() for row in padded(rows, right))]
    if len(shown) < len(metrics):
        lines.append(f"and {len(metrics) - len(shown)} more metric(s) (--all)")
    if order is not None:
        lines += order.lines(statuses)
    return "\n".join(lines)


Column = tuple[str, Callable[[Status], str], bool]
"""Heading, function that returns the cell of a trial, and whether cells are left-aligned."""


def _columns(statuses: Sequence[Status], values: Iterable[str], metrics: Iterable[str]) -> Iterator[Column]:
    yield "trial", lambda status: str(status.trial.number), False
    yield "state", lambda status: status.state, True
    for name in values:
        yield name, lambda status, name=name: _cell_of(status.values, name), False  # type: ignore[misc]
    for name in metrics:
        yield name, lambda status, name=name: _cell_of(status.metrics, name), False  # type: ignore[misc]
    yield "node", lambda status: status.node, True
    yield "restarts", lambda status: str(status.history.restarts), False
    yield "seconds", lambda status: f"{seconds(status):.0f}", False
    if any(status.error for status in statuses):
        yield "why", lambda status: _printable(status.error), True


def _cell_of(found: Mapping[str, Any], name: str) -> str:
    """Format the value ``found[name]`` for a cell of the table. Return "" if the value is missing."""
    return _cell(found[name]) if name in found else ""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    shown = _printable(value if isinstance(value, str) else json.dumps(value))
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 3]}..."


def _printable(shown: str) -> str:
    """Escape characters that could control a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)


# -- data ----------------------------------------------------------------------------------------------------


def as_dict(search: str, status: Status) -> dict[str, Any]:
    """Return a trial as JSON values. NaN and infinity become text, because JSON does not have them."""
    return {
        "search": search,
        "trial": status.trial.number,
        "state": status.state,
        "values": _finite(status.values),
        "metrics": _finite(status.metrics),
        "node": status.node,
        "job": status.history.job or None,
        "restarts": status.history.restarts,
        "preemptions": status.history.preemptions,
        "failures": status.history.failures,
        "seconds": round(seconds(status), 3),
        "why": status.error,
        "folder": str(status.trial.path),
    }


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return trials as CSV, with columns for hyperparameters (``values.lr``) and metrics (``metrics.loss``)."""
    flat = [dict(_flat(row)) for row in rows]
    names = names_in(flat)
    names.sort(key=lambda name: name.startswith(("values.", "metrics.")))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the column name and the value of each cell in a row."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            for inner, each in value.items():
                yield f"{name}.{inner}", json.dumps(each) if isinstance(each, (dict, list)) else each
        else:
            yield name, value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
