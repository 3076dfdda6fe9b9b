"""StageTimeline: a callback that writes the times of a pipeline's stages to a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from lockstep.callbacks.base import Callback
from lockstep.extensions.balancing.pipeline.times import NAMES, StageTimes, WindowOfStage
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

MOST_WINDOWS = 4096
"""Maximum number of windows whose seconds are kept; beyond this limit, every other window is dropped."""
COLUMNS = ("step", "stages", "split", "part", "begin", "seconds")
Row = tuple[int, str, str, float | str, float]
"""Step, split, part, begin and seconds."""


@dataclass
class _PlaceTimes:
    """Times measured at one pipeline position: a rank, or a device if one process drives all devices.

    Attributes:
        seconds: one row for each window, with the seconds of a micro-batch.
        parts: rows of the last window for each split, by the number of decisions.
        every: number of steps between two rows of ``seconds``.
    """

    seconds: list[Row] = field(default_factory=list)
    parts: dict[int, list[Row]] = field(default_factory=dict)
    every: int = 1


class StageTimeline(Callback):
    """A callback that writes the stage times of ``strategy="balanced"`` to a CSV file when a fit ends.

    A row has the columns ``step``, ``stages`` (of a rank, separated by spaces), ``split`` (blocks of each stage),
    ``part``, ``begin`` and ``seconds``. Rows with the part "a micro-batch" contain its seconds on a rank, without
    waiting, step by step. The other rows contain all parts of single windows (the last one before each change of the
    split, and the last of all) by the clock of the rank's host. Between parts the rank waits. Of several replicas the
    first is written. Measuring takes about a microsecond for each part of a micro-batch.

    Args:
        path: path of the file.

    Raises:
        MisconfigurationException: when a fit starts, if it has another strategy or the file cannot be written.

    Example::

        Trainer(devices=2, strategy="balanced", callbacks=[StageTimeline("stages.csv")]).fit(model)
    """

    def __init__(self, path: str | os.PathLike[str] = "stages.csv") -> None:
        self.path = os.fspath(path)
        self._places: dict[int, _PlaceTimes] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the strategy and the path, and start to measure every accumulation window.

        Raises:
            MisconfigurationException: the strategy has no stages, or the file cannot be written.
        """
        times = self._times(trainer)
        if not times:
            raise MisconfigurationException(
                f"StageTimeline writes times of pipeline stages, and {type(trainer.strategy).__name__} has none: use "
                'strategy="balanced", or remove the callback.'
            )
        # a path that cannot be written to is reported now, not after the fit
        if trainer.is_global_zero:
            self._open("a").close()
        self._places = {place: _PlaceTimes() for place in times}
        for place, each in times.items():
            each.listener = partial(self._add, trainer, self._places[place])

    @staticmethod
    def _times(trainer: Trainer) -> Mapping[int, StageTimes]:
        return getattr(trainer.strategy, "times", {})

    def _add(self, trainer: Trainer, place: _PlaceTimes, window: WindowOfStage) -> None:
        """Record a window's seconds per micro-batch, and its timed spans in place of the split's previous ones."""
        strategy: Any = trainer.strategy
        step, split = trainer.global_step, " ".join(map(str, strategy.split))
        if step % place.every == 0:
            place.seconds.append((step, split, "a micro-batch", "", sum(window.seconds) / window.micro_batches))
        if len(place.seconds) > MOST_WINDOWS:
            place.every *= 2
            place.seconds = [row for row in place.seconds if row[0] % place.every == 0]
        # replaced by the next window until the split changes
        place.parts[len(strategy.decisions)] = [
            (step, split, NAMES[span.part], window.begin + span.begin, span.end - span.begin) for span in window.spans
        ]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the times from all ranks, and write the CSV file on rank 0."""
        times = self._times(trainer)
        if not times:
            return
        for each in times.values():
            each.listener = None
        mine = {place: [*times.seconds, *chain(*times.parts.values())] for place, times in self._places.items()}
        by_rank = trainer.strategy.gather_objects(mine)
        if trainer.is_global_zero:
            # reversed, so that the first replica's rows are kept
            first = {place: rows for of_rank in reversed(by_rank) for place, rows in of_rank.items()}
            with self._open("w") as file:
                table = csv.writer(file)
                table.writerow(COLUMNS)
                for number, place in enumerate(sorted(first, reverse=True)):
                    for step, split, *others in first[place]:
                        stages = range(number, len(split.split()), len(first))
                        table.writerow((step, " ".join(map(str, stages)), split, *others))

    def _open(self, mode: str) -> IO[str]:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            return open(self.path, mode, newline="")
        except OSError as error:
            raise MisconfigurationException(
                f"StageTimeline({self.path!r}): the file cannot be written ({error}). Pass another path."
            ) from error
