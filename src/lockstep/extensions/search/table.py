"""The trials of a search as a table: as text, as CSV, as JSON; and the best of them by a metric."""

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
"""Letters that a cell shows of a value."""
MOST_METRICS = 6
"""Metrics that the table shows unless it is told to show all."""
LARGEST = ("acc", "auc", "f1", "score", "precision", "recall", "reward", "iou", "bleu", "r2", "map", "psnr", "ssim")
"""What is in the names of metrics of which the largest is the best."""


@dataclass(frozen=True)
class Order:
    """By which metric trials are compared, and whether the largest is the best."""

    metric: str
    largest: bool

    def of(self, status: Status) -> float | None:
        """The metric of a trial; None where it has none, or one that is no number."""
        value = status.metrics.get(self.metric)
        return None if not isinstance(value, (int, float)) or math.isnan(value) else float(value)

    def key(self, status: Status) -> float:
        """For sorting, the best first."""
        value = self.of(status)
        if value is None:
            return math.inf
        return -value if self.largest else value

    def lines(self, statuses: Iterable[Status]) -> list[str]:
        """The line that tells which trial is the best, of those that have come to their end, if there are any."""
        ended = [each for each in statuses if each.state in (COMPLETED, PRUNED) and self.of(each) is not None]
        if not ended:
            return []
        best, which = min(ended, key=self.key), "largest" if self.largest else "smallest"
        return [f"best: trial {best.trial.number}, {self.metric} {_cell(self.of(best))} (the {which})"]


def order_by(statuses: Sequence[Status], metric: str | None, largest: bool | None) -> Order | None:
    """How trials are compared.

    Args:
        statuses: of the trials.
        metric: as asked for; None: ``val_loss``, or ``value``, or another one of validation, or the only one.
        largest: as asked for; None: as the metric's name tells.

    Raises:
        MisconfigurationException: no trial has logged that metric.
    """
    names = names_in(status.metrics for status in statuses)
    if metric is None:
        usual = sorted(names, key=lambda name: (name not in ("val_loss", "value"), not name.startswith("val")))
        if not usual or (len(names) > 1 and not usual[0].startswith("val")):
            return None
        metric = usual[0]
    elif metric not in names:
        there = ", ".join(names) or "nothing yet"
        raise MisconfigurationException(f"--sort {metric}: no trial has logged that; there is: {there}")
    return Order(metric, any(part in metric.lower() for part in LARGEST) if largest is None else largest)


def names_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of all, in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of what is not the same in all rows; all names where there is one row."""
    names = names_in(rows)
    if len(rows) < 2:
        return names
    return [name for name in names if len({json.dumps(row.get(name)) for row in rows}) > 1]


def seconds(status: Status) -> float:
    """Time that a trial has run for, over all its starts, as far as that is known."""
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
    """The table for a screen: a line for each trial, and which one is the best.

    Args:
        name: of the search.
        statuses: in the order in which they are shown.
        order: by which the best is chosen.
        everything: all metrics, and hyperparameters in which trials do not differ.
    """
    counts = Counter(status.state for status in statuses)
    heading = f"{name}: {len(statuses)} trial(s): {', '.join(f'{count} {state}' for state, count in counts.items())}"
    drawn = [status.values for status in statuses if status.values]
    values, metrics = names_in(drawn) if everything else differing(drawn), names_in(each.metrics for each in statuses)
    if order is not None:
        metrics.sort(key=lambda name: name != order.metric)
    shown = metrics if everything else metrics[:MOST_METRICS]
    lines = [heading, *_aligned(statuses, _columns(statuses, values, shown))]
    if len(shown) < len(metrics):
        lines.append(f"and {len(metrics) - len(shown)} more metric(s) (--all)")
    if order is not None:
        lines += order.lines(statuses)
    return "\n".join(lines)


Column = tuple[str, Callable[[Status], str], bool]
"""Its head, the cell of a trial, and whether cells begin on the left."""


def _columns(statuses: Sequence[Status], values: Iterable[str], metrics: Iterable[str]) -> Iterator[Column]:
    yield "trial", lambda status: str(status.trial.number), False
    yield "state", lambda status: status.state, True
    for name in values:
        yield name, lambda status, name=name: _of(status.values, name), False  # type: ignore[misc]
    for name in metrics:
        yield name, lambda status, name=name: _of(status.metrics, name), False  # type: ignore[misc]
    yield "node", lambda status: status.node, True
    yield "restarts", lambda status: str(status.history.restarts), False
    yield "seconds", lambda status: f"{seconds(status):.0f}", False
    if any(status.error for status in statuses):
        yield "why", lambda status: _printable(status.error), True


def _aligned(statuses: Sequence[Status], columns: Iterable[Column]) -> Iterator[str]:
    """The lines of a table, its heads first."""
    heads, cells, begin_left = zip(*columns, strict=True)
    rows = [[*map(_cell, heads)], *([cell(status) for cell in cells] for status in statuses)]
    right = [number for number, left in enumerate(begin_left) if not left]
    return ("  ".join(row).rstrip() for row in padded(rows, right))


def _of(found: Mapping[str, Any], name: str) -> str:
    """The cell of a value; empty where there is none of the name."""
    return _cell(found[name]) if name in found else ""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    shown = _printable(value if isinstance(value, str) else json.dumps(value))
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 3]}..."


def _printable(shown: str) -> str:
    """Text that cannot steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)


# -- data ----------------------------------------------------------------------------------------------------


def as_dict(search: str, status: Status) -> dict[str, Any]:
    """A trial as plain values; a number that JSON does not know (NaN, infinity) as text."""
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
    """Trials as CSV, a column for each hyperparameter (``values.lr``) and each metric (``metrics.loss``)."""
    flat = [dict(_flat(row)) for row in rows]
    names = names_in(flat)
    names.sort(key=lambda name: name.startswith(("values.", "metrics.")))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The cells of a row, by their columns."""
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
