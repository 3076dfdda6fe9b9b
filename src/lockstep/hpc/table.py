"""The trials of a search as a table: as text, as CSV, as JSON; and the best of them by a metric."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.hpc.search import COMPLETED, PRUNED, RUNNING, Status

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
        return math.inf if value is None else -value if self.largest else value


def order_by(statuses: Sequence[Status], metric: str | None, largest: bool | None) -> Order | None:
    """How trials are compared.

    Args:
        statuses: of the trials.
        metric: as asked for; None: ``val_loss``, or another one of validation, or ``value``, or the only one.
        largest: as asked for; None: as the metric's name tells.

    Raises:
        MisconfigurationException: no trial has logged that metric.
    """
    names = metric_names(statuses)
    if metric is None:
        usual = [name for name in names if name in ("val_loss", "value")] + [n for n in names if n.startswith("val")]
        if not usual and len(names) != 1:
            return None
        metric = (usual or names)[0]
    elif metric not in names:
        there = ", ".join(names) or "nothing yet"
        raise MisconfigurationException(f"--sort {metric}: no trial has logged that; there is: {there}")
    return Order(metric, any(part in metric.lower() for part in LARGEST) if largest is None else largest)


def metric_names(statuses: Sequence[Status]) -> list[str]:
    """The metrics of all trials, in the order in which they come."""
    return list(dict.fromkeys(name for status in statuses for name in status.metrics))


def value_names(statuses: Sequence[Status], everything: bool = False) -> list[str]:
    """The hyperparameters in which trials differ; all of them where there is but one trial."""
    names = list(dict.fromkeys(name for status in statuses for name in status.values))
    drawn = [status for status in statuses if status.values]
    if everything or len(drawn) < 2:
        return names
    return [name for name in names if len({json.dumps(status.values.get(name)) for status in drawn}) > 1]


def best(statuses: Sequence[Status], order: Order | None) -> Status | None:
    """The trial with the best value, of those that have come to their end."""
    if order is None:
        return None
    ended = [status for status in statuses if status.state in (COMPLETED, PRUNED) and order.of(status) is not None]
    return min(ended, key=order.key, default=None)


def seconds(status: Status, now: float | None = None) -> float:
    """Time that a trial has run for, over all its starts, as far as that is known."""
    last = status.history.last
    if last is None:
        return 0.0
    until = last.last
    if status.state == RUNNING:
        until = time.time() if now is None else now
    elif last.end is None:
        until = max(until, float(status.result.get("time", 0.0)))
    return status.history.seconds - (last.last - last.began) + max(0.0, until - last.began)


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
    values, metrics = value_names(statuses, everything), metric_names(statuses)
    if order is not None:
        metrics = [order.metric, *(name for name in metrics if name != order.metric)]
    shown = metrics if everything else metrics[:MOST_METRICS]
    has_why = any(status.error for status in statuses)
    heads = ["trial", "state", *map(_cell, values), *map(_cell, shown), "node", "restarts", "seconds"]
    rows = [[*heads, *(["why"] if has_why else [])]]
    for status in statuses:
        row = [str(status.trial.number), status.state]
        row += [*_cells(status.values, values), *_cells(status.metrics, shown)]
        row += [status.node, str(status.history.restarts), f"{seconds(status):.0f}"]
        rows.append([*row, *([_printable(status.error)] if has_why else [])])
    lines = [heading, *_aligned(rows, {1, len(heads) - 3, len(heads)})]
    if len(shown) < len(metrics):
        lines.append(f"and {len(metrics) - len(shown)} more metric(s) (--all)")
    return "\n".join([*lines, *_best(statuses, order)])


def _best(statuses: Sequence[Status], order: Order | None) -> list[str]:
    """The line that tells which trial is the best."""
    found = best(statuses, order)
    if found is None or order is None:
        return []
    which = "largest" if order.largest else "smallest"
    return [f"best: trial {found.trial.number}, {order.metric} {_cell(order.of(found))} (the {which})"]


def _cells(found: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """A cell for each name, empty where nothing of the name was found."""
    return [_cell(found[name]) if name in found else "" for name in names]


def _aligned(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) if at in left else cell.rjust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        yield "  ".join(cells).rstrip()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    shown = value if isinstance(value, str) else json.dumps(value)
    shown = _printable(shown)
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
        "job": status.history.jobs[-1] if status.history.jobs else None,
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
    names = list(dict.fromkeys(name for row in flat for name in row))
    names.sort(key=lambda name: name.partition(".")[0] in ("values", "metrics"))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name in ("values", "metrics"):
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
