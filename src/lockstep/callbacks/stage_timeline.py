"""StageTimeline: a picture of a pipeline's stages over a fit, who computes and who waits, and how the split changed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.parallel.pipeline.control import Resplit
from lockstep.parallel.pipeline.times import BACKWARD as OF_BACKWARD
from lockstep.parallel.pipeline.times import BLOCKS, Span, StageTimes, WindowOfStage
from lockstep.planner.timeline import BACKWARD, FORWARD, OUTSIDE, Bar, draw_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

MOST_WINDOWS = 4096
"""Windows whose seconds are kept; where there are more, every other one is."""
MOST_DRAWN = 4
"""Windows that are drawn by their parts: of the first split and of the last ones."""


class _Shown(NamedTuple):
    """A window of one place in the pipeline: a rank, or a device of one process."""

    step: int
    split: tuple[int, ...]
    begin: float
    spans: tuple[Span, ...]


@dataclass
class _Seen:
    """What a place has measured.

    Attributes:
        seconds: of a micro-batch, with the step.
        shown: windows, by the number of decisions before them.
        every: steps from one of ``seconds`` to the next.
    """

    seconds: list[tuple[int, float]] = field(default_factory=list)
    shown: dict[int, _Shown] = field(default_factory=dict)
    every: int = 1


class StageTimeline(Callback):
    """Draws the stages of ``strategy="balanced"`` into a PNG when a fit ends.

    On top is what a micro-batch takes each stage, without waiting, step by step, with the changes of the split.
    Below are single windows, the last one before each change and the last of all: what each stage computes when,
    and where it waits. Of several replicas the first is drawn. A rank measures all its windows meanwhile, a
    microsecond for each part of a micro-batch.

    Args:
        path: of the picture.

    Raises:
        ModuleNotFoundError: when a fit begins, and matplotlib is not installed.
        MisconfigurationException: when a fit begins with another strategy, or the picture cannot be written.

    Example::

        Trainer(devices=2, strategy="balanced", callbacks=[StageTimeline("stages.png")]).fit(model)
    """

    def __init__(self, path: str | os.PathLike[str] = "stages.png") -> None:
        self.path = os.fspath(path)
        self._places: dict[int, _Seen] = {}
        self._before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask the strategy for the times of all windows."""
        times = self._times(trainer)
        if not times:
            raise MisconfigurationException(
                f"StageTimeline draws the stages of a pipeline, and {type(trainer.strategy).__name__} has none: use "
                'strategy="balanced", or leave it out.'
            )
        if trainer.is_global_zero:
            _figure()
            with _writing(self.path):
                os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self._places = {place: _Seen() for place in times}
        self._before = len(trainer.strategy.decisions)  # type: ignore[attr-defined]  # of earlier fits
        for place, each in times.items():
            each.listener, each.keeps_spans = partial(self._take, trainer, self._places[place]), True

    @staticmethod
    def _times(trainer: Trainer) -> Mapping[int, StageTimes]:
        return getattr(trainer.strategy, "times", {})

    def _take(self, trainer: Trainer, seen: _Seen, window: WindowOfStage) -> None:
        """A window has been measured."""
        strategy: Any = trainer.strategy
        step = trainer.global_step
        if step % seen.every == 0:
            seen.seconds.append((step, sum(window.seconds) / window.micro_batches))
        if len(seen.seconds) > MOST_WINDOWS:
            seen.every *= 2
            seen.seconds = [each for each in seen.seconds if each[0] % seen.every == 0]
        seen.shown[len(strategy.decisions)] = _Shown(step, strategy.split, window.begin, window.spans)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring all ranks' times together, and draw them."""
        times = self._times(trainer)
        if not times:
            return
        for each in times.values():
            each.listener, each.keeps_spans = None, False
        told = {place: (seen.seconds, list(seen.shown.values())) for place, seen in self._places.items()}
        by_rank = trainer.strategy.gather_objects(told)
        if trainer.is_global_zero:
            strategy: Any = trainer.strategy
            decisions = [change for change in strategy.decisions[self._before :] if change.before != change.after]
            # of replicas the first one is left
            first = {place: seen for of_rank in reversed(by_rank) for place, seen in of_rank.items()}
            stages = [first[place] for place in sorted(first, reverse=True)]
            self._draw(stages, decisions, trainer.num_nodes == 1)

    def _draw(
        self, stages: Sequence[tuple[list[tuple[int, float]], list[_Shown]]], decisions: list[Resplit], one_clock: bool
    ) -> None:
        """Draw.

        Args:
            stages: what each of them has measured.
            decisions: changes of the split.
            one_clock: all ranks have the same.
        """
        drawn = list(zip(*(shown for _, shown in stages), strict=False))
        drawn = drawn if len(drawn) <= MOST_DRAWN else [drawn[0], *drawn[1 - MOST_DRAWN :]]
        figure = _figure()
        figure.set_size_inches(11, 3.4 + (0.9 + 0.5 * len(stages)) * len(drawn))
        heights = [3.0, *([0.5 + 0.5 * len(stages)] * len(drawn))]
        axes: list[Axes] = list(figure.subplots(1 + len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0])
        depth = len(drawn[0][0].split) if drawn else len(stages)
        labels = [_stages(row, len(stages), depth) for row in range(len(stages))]
        _draw_seconds(axes[0], dict(zip(labels, (seconds for seconds, _ in stages), strict=True)), decisions)
        for place, same in zip(axes[1:], drawn, strict=True):
            origin = min(each.begin for each in same)
            origins = [origin if one_clock else each.begin for each in same]
            bars = [bar for stage, each in enumerate(same) for bar in _bars(stage, each, origins[stage])]
            split, rows = same[0].split, len(same)
            names = [
                f"{_stages(row, rows, len(split))}: {' + '.join(map(str, split[row::rows]))} blocks"
                for row in range(rows)
            ]
            draw_stages(place, bars, names)
            place.set_title(f"step {same[0].step}", loc="left", fontsize="medium")
        if drawn:
            figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
        with _writing(self.path):
            figure.savefig(self.path, dpi=110, format="png")


def _stages(row: int, rows: int, stages: int) -> str:
    """Of a rank, which has one, or several that go round the ranks."""
    numbers = range(row, stages, rows)
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _bars(stage: int, window: _Shown, origin: float) -> list[Bar]:
    names = {BLOCKS: FORWARD, OF_BACKWARD: BACKWARD}
    late = window.begin - origin
    return [Bar(stage, names.get(span.part, OUTSIDE), late + span.begin, late + span.end) for span in window.spans]


def _draw_seconds(axes: Axes, stages: dict[str, list[tuple[int, float]]], decisions: Sequence[Resplit]) -> None:
    colors = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
    for number, (name, seconds) in enumerate(stages.items()):
        steps, took = [step for step, _ in seconds], [1e3 * each for _, each in seconds]
        axes.plot(steps, took, label=name, color=colors[number % len(colors)], linewidth=1.4)
    top = sorted(1e3 * each for seconds in stages.values() for _, each in seconds)
    axes.set_ylim(0, 1.25 * top[int(0.98 * (len(top) - 1))] if top else 1.0)  # a hiccup of the machine may go beyond
    for change in decisions:
        axes.axvline(change.step, color="black", linestyle="--", linewidth=0.8)
        before, after = ("/".join(map(str, counts)) for counts in (change.before, change.after))
        at = axes.get_xaxis_transform()
        axes.text(change.step, 0.98, f" {before} to {after}", transform=at, va="top", fontsize="small")
    axes.set_xlabel("step")
    axes.set_ylabel("ms of a micro-batch,\nwithout waiting")
    axes.legend(loc="lower right", fontsize="small")


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MisconfigurationException(f"StageTimeline({path!r}): {error}") from error


def _figure() -> Figure:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise missing_extra("matplotlib", "plot", "StageTimeline") from None
    made: Figure = figures.Figure(layout="constrained")
    return made
