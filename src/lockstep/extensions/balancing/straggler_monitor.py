"""StragglerMonitor: a callback that names a slow rank and the slow part of its steps."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from lockstep.callbacks.base import Callback
from lockstep.extensions.balancing.balance.step_times import PARTS, WindowTimes
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

BUSY = tuple(name for name in PARTS if name != "waiting")


@dataclass(frozen=True)
class RankScore:
    """Speed of a rank compared with the fastest rank and with its own best, and the slowest part of its step.

    Attributes:
        rank: number of the rank.
        host: name of the rank's host.
        times: seconds by part, and samples, of the rank's typical step.
        score: the rank's seconds per sample without waiting, divided by the fastest rank's: 2.0 is half as fast.
        past: the rank's seconds per sample without waiting, divided by the rank's own best so far.
        part: the part of its step with the largest excess over the other ranks (on one device, over its own best):
            "data", "forward", "backward" or "other" (the update, hooks).
    """

    rank: int
    host: str
    times: WindowTimes
    score: float
    past: float
    part: str

    def __str__(self) -> str:
        where = f"; most of it in {self.part}" if max(self.score, self.past) > 1 else ""
        parts = ", ".join(f"{name} {getattr(self.times, name) * 1e3:.3g}" for name in PARTS)
        return (
            f"rank {self.rank} on {self.host} takes {self.score:.2f} x the fastest rank's time for a sample, and "
            f"{self.past:.2f} x its own best{where} (ms of a step of {self.times.samples:g} "
            f"samples: {parts})"
        )


class StragglerMonitor(Callback):
    """A callback that times the parts of each rank's training steps, and warns of ranks that are slower than others.

    Every eight steps the ranks exchange the medians of their steps: seconds of fetching data, forward, backward,
    waiting for other ranks, and the rest. A warning names a rank if its time for a sample, waiting excluded, was
    ``threshold`` times the fastest rank's ``patience`` times in a row. It contains rank, host, slowest part of the
    step, and the score relative to the fastest rank and to the rank's own best. On one device, only its own best
    counts.

    Loggers get ``straggler/rank``, ``straggler/score`` and ``straggler/past`` of the slowest rank, and
    ``straggler/waiting``, the fraction of a step that ranks wait on average.

    Args:
        threshold: a score from which a rank is slow, above 1.
        patience: times in a row that a rank must be slow, at least 1.

    Attributes:
        scores: the newest `RankScore` of each rank, by rank; empty before the first exchange.
        named: scores of the ranks that were named so far.

    Raises:
        MisconfigurationException: when a fit starts, under a strategy whose steps cannot be measured by part (``dp``
            and pipelines).

    Example::

        monitor = StragglerMonitor()
        Trainer(devices=4, callbacks=[monitor]).fit(model)
        print(*monitor.scores, sep="\\n")
    """

    _receives_step_times = True

    def __init__(self, threshold: float = 1.25, patience: int = 3) -> None:
        self.threshold = threshold
        self.patience = patience
        self.scores: list[RankScore] = []
        self.named: list[RankScore] = []
        self._hosts: list[str] = []
        self._best: list[WindowTimes] = []
        self._slow: list[int] = []  # exchanges in a row, by rank
        self._named_now: set[int] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the host names of all ranks, and reset the scores."""
        self._hosts = trainer.strategy.gather_objects(socket.gethostname())
        self.scores, self._best, self._named_now = [], [], set()
        self._slow = [0] * trainer.world_size

    def _on_step_times(self, trainer: Trainer, by_rank: Sequence[WindowTimes]) -> None:
        # a device that has not finished a single step yet
        if any(math.isnan(_pace(times)) for times in by_rank):
            return
        self.scores = self._make_scores(by_rank)
        slowest = max(self.scores, key=lambda each: (each.score, each.past))
        for each in self.scores:
            is_slow = (each.score if len(by_rank) > 1 else each.past) >= self.threshold
            self._slow[each.rank] = self._slow[each.rank] + 1 if is_slow else 0
            if not is_slow and each.rank in self._named_now:
                self._named_now.discard(each.rank)
                rank_zero_info(f"StragglerMonitor: rank {each.rank} on {each.host} is as fast as the others again.")
            elif self._slow[each.rank] >= self.patience and each.rank not in self._named_now:
                self._named_now.add(each.rank)
                self.named.append(each)
                rank_zero_warn(f"StragglerMonitor: step {trainer.global_step}: {each}.")
        if trainer.is_global_zero:
            waiting = sum(t.waiting / ((t.busy + t.waiting) or 1.0) for t in by_rank) / len(by_rank)
            metrics = {"rank": slowest.rank, "score": slowest.score, "past": slowest.past, "waiting": waiting}
            for logger in trainer.loggers:
                named = {f"straggler/{name}": float(value) for name, value in metrics.items()}
                logger.log_metrics(named, step=trainer.fit_loop.progress.windows)
                logger.save()

    def _make_scores(self, by_rank: Sequence[WindowTimes]) -> list[RankScore]:
        paces = [_pace(times) for times in by_rank]
        before = self._best or by_rank
        self._best = [min(each, key=_pace) for each in zip(by_rank, before, strict=True)]
        fastest = min(paces) or 1.0
        found = []
        for rank, (times, pace, best) in enumerate(zip(by_rank, paces, self._best, strict=True)):
            others = [each for other, each in enumerate(by_rank) if other != rank] or [best]
            excess = {name: _each(times, name) - median(_each(other, name) for other in others) for name in BUSY}
            part = max(excess, key=excess.__getitem__)
            past = pace / (_pace(best) or 1.0)
            found.append(RankScore(rank, self._hosts[rank], times, pace / fastest, past, part))
        return found


def _each(times: WindowTimes, part: str) -> float:
    """Return the seconds per sample of one part of the step."""
    return float(getattr(times, part)) / (times.samples or 1.0)


def _pace(times: WindowTimes) -> float:
    """Return the seconds per sample of the step without waiting."""
    return times.busy / (times.samples or 1.0)
