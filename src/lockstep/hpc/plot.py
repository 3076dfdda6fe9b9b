"""The trials of a search as one picture: parallel coordinates, metric curves, and which hyperparameter matters."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.hpc.search import COMPLETED, Status
from lockstep.hpc.table import Order, best, value_names

MOST_CURVES = 200
"""Trials whose curves are drawn: the best ones."""
LONGEST = 18
"""Letters that an axis shows of a value."""


def draw(name: str, statuses: Sequence[Status], order: Order, path: str) -> None:
    """Draw trials into a PNG.

    Args:
        name: of the search.
        statuses: of its trials.
        order: the metric that is drawn, and whether its largest value is the best.
        path: of the picture.

    Raises:
        MisconfigurationException: no trial has a value of the metric, or the picture cannot be written.
    """
    figures = importlib.import_module("matplotlib.figure")
    measured = [status for status in statuses if order.of(status) is not None]
    if not measured:
        raise MisconfigurationException(f"--plot: no trial has a number as {order.metric} yet")
    matters = importance(measured, order)
    parts = 3 if matters else 2
    figure = figures.Figure(figsize=(11, 3.6 * parts), layout="constrained")
    axes = figure.subplots(parts, 1)
    figure.suptitle(f"{name}: {len(measured)} trial(s)")
    measured.sort(key=order.key, reverse=True)
    found = best(measured, order) or measured[-1]
    measured = [*(status for status in measured if status is not found), found]  # drawn last, and so on top
    _coordinates(axes[0], measured, order)
    _curves(axes[1], measured[-MOST_CURVES:], order)
    if matters:
        _importance(axes[2], matters, order)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise MisconfigurationException(f"--plot {path}: {error}") from error


# -- parallel coordinates ------------------------------------------------------------------------------------


def _coordinates(axis: Any, statuses: Sequence[Status], order: Order) -> None:
    """A line for each trial over its hyperparameters to its metric; the best one is the last, and drawn on top."""
    names = value_names(statuses)
    columns = [Scale([status.values.get(name) for status in statuses]) for name in names]
    columns.append(Scale([order.of(status) for status in statuses]))
    for number, style in enumerate(_styles(statuses, order)):
        axis.plot(range(len(columns)), [column.heights[number] for column in columns], **style)
    found = statuses[-1]
    axis.set_title(f"best: trial {found.trial.number}, {_short(order.metric)} {order.of(found):.6g}", fontsize=10)
    axis.set_xticks(range(len(columns)), [_short(name) for name in [*names, order.metric]])
    axis.set_yticks([])
    axis.set_ylim(-0.06, 1.06)
    axis.set_xlim(-0.2, len(columns) - 1 + 0.45)
    for place, column in enumerate(columns):
        axis.axvline(place, color="0.6", linewidth=0.8, zorder=0)
        for height, label in column.ticks:
            axis.annotate(label, (place, height), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center",
                          bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})  # fmt: skip


def _styles(statuses: Sequence[Status], order: Order) -> list[dict[str, Any]]:
    """How each trial is drawn: in the color of its metric, and the last one thicker."""
    colors = importlib.import_module("matplotlib").colormaps["viridis" if order.largest else "viridis_r"]
    heights = Scale([order.of(status) for status in statuses]).heights
    styles = [{"color": colors(height), "linewidth": 1.2, "alpha": 0.8} for height in heights]
    styles[-1].update(linewidth=3, alpha=1, marker="o", markersize=5)
    return styles


class Scale:
    """One axis: where each of some values stands on it, from 0 to 1.

    Numbers stand by their size, or by their logarithm where they are positive and span a factor of 50; anything else
    by its place in the order.

    Attributes:
        heights: of the values.
        ticks: heights with labels.

    Example:
        >>> Scale([0.001, 0.1, 0.01]).heights, Scale(["b", "a"]).heights
        ([0.0, 1.0, 0.5], [1.0, 0.0])
    """

    def __init__(self, values: Sequence[Any]) -> None:
        numbers = [value for value in values if _is_number(value)]
        if len(numbers) == len(values):
            logs = min(numbers) > 0 and max(numbers) / min(numbers) >= 50
            scaled = [math.log(value) if logs else float(value) for value in numbers]
            low, high = min(scaled), max(scaled)
            self.heights = [round((at - low) / (high - low), 9) if high > low else 0.5 for at in scaled]
            seen = sorted(dict(zip(self.heights, numbers, strict=True)).items())
            if len(seen) > 6:
                shown = [low + (high - low) * part / 4 for part in range(5)]
                seen = [(part / 4, math.exp(at) if logs else at) for part, at in enumerate(shown)]
            self.ticks = [(height, f"{value:.4g}") for height, value in seen]
        else:
            texts = [_short(value if isinstance(value, str) else repr(value)) for value in values]
            kinds = sorted(set(texts))
            places = {kind: at / max(1, len(kinds) - 1) if len(kinds) > 1 else 0.5 for at, kind in enumerate(kinds)}
            self.heights = [places[each] for each in texts]
            step = -(-len(kinds) // 12)
            self.ticks = [(places[kind], kind) for kind in kinds[::step]]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: str) -> str:
    shown = "".join(each if each.isprintable() and each != "$" else "?" for each in value)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


# -- curves --------------------------------------------------------------------------------------------------


def _curves(axis: Any, statuses: Sequence[Status], order: Order) -> None:
    """The metric over the steps, a line for each trial, in the colors of the other picture."""
    for status, style in zip(statuses, _styles(statuses, order), strict=True):
        curve = curve_of(status.trial.curves(), order.metric)
        if curve:
            axis.plot(*zip(*curve, strict=True), **{"marker": ".", **style})
    axis.set_xlabel("step")
    axis.set_ylabel(_short(order.metric))


def curve_of(lines: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    """(step, value) of a metric; of a step that a trial made again after a restart, the later value.

    Example:
        >>> curve_of([{"step": 1, "metrics": {"loss": 3.0}}, {"step": 1, "metrics": {"loss": 2.0}}], "loss")
        [(1, 2.0)]
    """
    found: dict[float, float] = {}
    for number, line in enumerate(lines):
        value = line.get("metrics", {}).get(metric)
        if _is_number(value):
            found[line.get("step", number)] = value
    return sorted(found.items())


# -- importance ----------------------------------------------------------------------------------------------


def importance(statuses: Sequence[Status], order: Order) -> dict[str, float]:
    """How much each hyperparameter matters for the metric, by Optuna; empty where that is missing or cannot say."""
    names = value_names(statuses)
    ended = [
        status for status in statuses if status.state == COMPLETED and all(name in status.values for name in names)
    ]
    if len(ended) < 4 or not names:
        return {}
    try:
        optuna = importlib.import_module("optuna")
    except ModuleNotFoundError:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds: dict[str, Any] = {}
    for name in names:
        seen = [status.values[name] for status in ended]
        if all(map(_is_number, seen)):
            kinds[name] = optuna.distributions.FloatDistribution(float(min(seen)), float(max(seen)))
        else:
            kinds[name] = optuna.distributions.CategoricalDistribution(sorted(set(map(repr, seen))))
    study = optuna.create_study(direction="maximize" if order.largest else "minimize")
    for status in ended:
        params = {
            name: float(status.values[name]) if _is_number_axis(kinds[name]) else repr(status.values[name])
            for name in names
        }
        value = order.of(status)
        if value is not None and math.isfinite(value):
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value))
    try:
        found: dict[str, float] = optuna.importance.get_param_importances(study)
    except (ImportError, ValueError, RuntimeError):  # scikit-learn is missing, or all trials are alike
        return {}
    return found


def _is_number_axis(kind: object) -> bool:
    return type(kind).__name__ == "FloatDistribution"


def _importance(axis: Any, matters: Mapping[str, float], order: Order) -> None:
    names = list(matters)[::-1]
    axis.barh([_short(name) for name in names], [matters[name] for name in names], color="tab:blue")
    axis.set_xlabel(f"importance for {_short(order.metric)} (Optuna)")
    axis.set_xlim(0, 1)
