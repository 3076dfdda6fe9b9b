"""StageTimeline: what the stages of a pipeline compute over a fit, and when, as CSV."""

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
"""Windows whose seconds are kept; where there are more, every other one is."""
COLUMNS = ("step", "stages", "split", "part", "begin", "seconds")
Row = tuple[int, str, str, float | str, float]
"""Step, split, part, begin and seconds."""


@dataclass
class _Seen:
    """What a place in the pipeline has measured: a rank, or a device of one process.

    Attributes:
        seconds: a micro-batch's, of one window each.
        parts: of the last window before each change of the split, and of the last of all; by the number of decisions.
        every: steps from one of ``seconds`` to the next.
    """

    seconds: list[Row] = field(default_factory=list)
    parts: dict[int, list[Row]] = field(default_factory=dict)
    every: int = 1


class StageTimeline(Callback):
    """Writes what the stages of ``strategy="balanced"`` compute into a CSV file when a fit ends.

    A row has the columns ``step``, ``stages`` (of a rank: one, or several with spaces), ``split`` (blocks of each
    stage), ``part``, ``begin`` and ``seconds``. Rows with the part "a micro-batch" have what one takes the stages of a
    rank, without waiting, step by step. The others have single windows, the last one before each change of the split
    and the last of all: when a rank computes what, by its host's clock. In between it waits. Of several replicas the
    first is there. A rank measures all its windows meanwhile, a microsecond for each part of a micro-batch.

    Args:
        path: of the file.

    Raises:
        MisconfigurationException: when a fit begins with another strategy, or the file cannot be written.

    Example::

        Trainer(devices=2, strategy="balanced", callbacks=[StageTimeline("stages.csv")]).fit(model)
    """

    def __init__(self, path: str | os.PathLike[str] = "stages.csv") -> None:
        self.path = os.fspath(path)
        self._places: dict[int, _Seen] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask the strategy for the times of all windows."""
        times = self._times(trainer)
        if not times:
            raise MisconfigurationException(
                f"StageTimeline shows the stages of a pipeline, and {type(trainer.strategy).__name__} has none: use "
                'strategy="balanced", or leave it out.'
            )
        if trainer.is_global_zero:
            self._writing("a").close()
        self._places = {place: _Seen() for place in times}
        for place, each in times.items():
            each.listener, each.keeps_spans = partial(self._take, trainer, self._places[place]), True

    @staticmethod
    def _times(trainer: Trainer) -> Mapping[int, StageTimes]:
        return getattr(trainer.strategy, "times", {})

    def _take(self, trainer: Trainer, seen: _Seen, window: WindowOfStage) -> None:
        """A window has been measured."""
        strategy: Any = trainer.strategy
        step, split = trainer.global_step, " ".join(map(str, strategy.split))
        if step % seen.every == 0:
            seen.seconds.append((step, split, "a micro-batch", "", sum(window.seconds) / window.micro_batches))
        if len(seen.seconds) > MOST_WINDOWS:
            seen.every *= 2
            seen.seconds = [row for row in seen.seconds if row[0] % seen.every == 0]
        seen.parts[len(strategy.decisions)] = [
            (step, split, NAMES[span.part], window.begin + span.begin, span.end - span.begin) for span in window.spans
        ]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring all ranks' times together, and write them."""
        times = self._times(trainer)
        if not times:
            return
        for each in times.values():
            each.listener, each.keeps_spans = None, False
        mine = {place: [*seen.seconds, *chain(*seen.parts.values())] for place, seen in self._places.items()}
        by_rank = trainer.strategy.gather_objects(mine)
        if trainer.is_global_zero:
            first = {place: rows for of_rank in reversed(by_rank) for place, rows in of_rank.items()}  # of replicas
            with self._writing("w") as file:
                table = csv.writer(file)
                table.writerow(COLUMNS)
                for number, place in enumerate(sorted(first, reverse=True)):
                    for step, split, *others in first[place]:
                        stages = range(number, len(split.split()), len(first))
                        table.writerow((step, " ".join(map(str, stages)), split, *others))

    def _writing(self, mode: str) -> IO[str]:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            return open(self.path, mode, newline="")
        except OSError as error:
            raise MisconfigurationException(f"StageTimeline({self.path!r}): {error}") from error
