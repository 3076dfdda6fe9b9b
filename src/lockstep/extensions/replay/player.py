"""Callback that replays steps of a run: it takes one window apart, and leaves samples out of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.data.window import Window
from lockstep.extensions.replay.operations import OperationTrace, nudge
from lockstep.extensions.replay.request import Findings, ReplayDone, ReplayEnd, ReplayRequest
from lockstep.extensions.replay.rows import NoRows, take
from lockstep.extensions.replay.window import PlacedMicroBatch, WindowAnalysis

if TYPE_CHECKING:
    from lockstep.data.feed import Feed
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class KeptWindow:
    """A window whose micro-batches are kept in a list. It can be iterated over more than once.

    Args:
        window: window that has not been iterated over.
        micro_batches: the micro-batches to yield.
    """

    def __init__(self, window: Window, micro_batches: Sequence[PlacedMicroBatch]) -> None:
        self._window = window
        self._micro_batches = micro_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        for micro_batch in self._micro_batches:
            yield micro_batch.batch, micro_batch.weight, micro_batch.share


class Player(Callback):
    """Callback that replays the requested steps, and then ends the script.

    Args:
        request: what to replay.
    """

    def __init__(self, request: ReplayRequest) -> None:
        self.request = request
        self.found = Findings()
        self.rank = 0
        self._losses: list[tuple[Tensor, float | Tensor]] = []
        self._place = 0
        self._first_place = -1  # micro-batch for which `_place` was determined
        self._left_out: set[int] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the fit's window runner, and let the loaders record which samples they read."""
        feed = trainer.session.fit.loaded
        self.rank = trainer.global_rank
        self._check_data(feed)
        for source in feed.sources[0].leaves():
            source.record_indices()
        step = trainer.fit_loop.step
        # not the instance's `window`, which measures the memory of the fit's first one
        play = type(step).window.__get__(step)
        read_loss = type(step).read_loss.__get__(step)

        def window(window: Window, batch_idx: int) -> Iterator[None]:
            return self._window(trainer, play, window, batch_idx)

        def read(output: Any, share: float) -> tuple[Tensor | None, float | Tensor]:
            loss, factor = read_loss(output, share)
            if loss is not None:
                self._losses.append((loss.detach(), factor))
            return loss, factor

        step.window = window  # type: ignore[method-assign]
        step.read_loss = read  # type: ignore[method-assign]

    def _check_data(self, feed: Feed) -> None:
        """Raise if the data set has another length than that of the run."""
        for before, now in zip(self.request.orders or (), feed.orders, strict=False):
            samples = before[1]
            if samples >= 0 and now.samples >= 0 and samples != now.samples:
                self.refuse(f"the data set has {now.samples} samples, but that of the run had {samples}")

    def refuse(self, text: str) -> NoReturn:
        """End the script, with the reason why the requested steps cannot be replayed."""
        self.found.refusal = text
        raise ReplayEnd

    def _window(self, trainer: Trainer, play: Any, window: Window, batch_idx: int) -> Iterator[None]:
        """Run a window, after its analysis if it is the requested one."""
        request, progress, step = self.request, trainer.session.fit.progress, trainer.fit_loop.step
        number = progress.windows
        if number > request.step and self._first_place < 0:  # the first window
            self.refuse(f"the fit continued at step {number}, after step {request.step}")
        micro_batches = self._with_places(trainer.session.fit.loaded, [*window], batch_idx)
        if request.without:
            micro_batches = self._without(micro_batches)
        if number == request.step and request.kind == "samples":
            WindowAnalysis(trainer, step).run(micro_batches, batch_idx, self.found)
        self._losses = []
        running = play(KeptWindow(window, micro_batches), batch_idx)
        if number == request.step and request.kind == "operations":
            running = self._traced(trainer, running)
        yield from running
        if self._losses:
            self.found.losses[number] = _mean(self._losses[: len(micro_batches)])
        if number >= request.until:
            if len(self._left_out) < len(request.without):
                missing = sorted(set(request.without) - self._left_out)
                self.found.notes.append(f"Not in these steps: {', '.join(map(str, missing))} of --without.")
            raise ReplayDone

    def _traced(self, trainer: Trainer, running: Iterator[None]) -> Iterator[None]:
        """Run a window, and write the trace of its operations."""
        module = trainer.session.module
        if self.request.nudge:
            nudge(module, self.request.nudge)
        trace = OperationTrace(module)
        while True:
            with trace.watching():  # not while the fit validates or logs
                try:
                    next(running)
                except StopIteration:
                    break
            yield
        trace.write(self.request.folder)

    def _with_places(
        self, feed: Feed, micro_batches: list[tuple[Any, float, float]], batch_idx: int
    ) -> list[PlacedMicroBatch]:
        """Return the micro-batches with the places of their samples."""
        recorded = [source.recorded for source in feed.sources[0].leaves()]
        if all(each is None for each in recorded) and self._first_place != batch_idx:
            self._place = _samples_before(feed, batch_idx)
        found = []
        for batch, weight, share in micro_batches:
            lists = [each.popleft() if each else [] for each in recorded]
            places: Sequence[int | list[int]]
            if not any(lists):
                places = range(self._place, self._place + round(weight))
            else:
                places = lists[0] if len(lists) == 1 else [list(row) for row in zip(*lists, strict=False)]
            self._place += round(weight)
            found.append(PlacedMicroBatch(batch, weight, share, places))
        self._first_place = batch_idx + len(found)
        return found

    def _without(self, micro_batches: list[PlacedMicroBatch]) -> list[PlacedMicroBatch]:
        """Return the micro-batches without the samples to leave out. The others weigh more."""
        out = self.request.without  # not a set: the place in several loaders is a list
        kept = [[row for row, place in enumerate(each.places) if place not in out] for each in micro_batches]
        self._left_out |= {place for each in micro_batches for place in each.places if place in out}
        if all(len(rows) == len(each.places) for rows, each in zip(kept, micro_batches, strict=True)):
            return micro_batches
        left = sum(map(len, kept))
        if not left:
            self.refuse("no sample of the step is left")
        total = sum(each.share for each in micro_batches)
        found = []
        for rows, each in zip(kept, micro_batches, strict=True):
            try:
                batch = take(each.batch, rows, len(each.places)) if rows else None
            except NoRows as error:
                self.refuse(str(error))
            places = [each.places[row] for row in rows]
            found.append(PlacedMicroBatch(batch, float(len(rows)), total * len(rows) / left, places))
        return found


def _samples_before(feed: Feed, number: int) -> int:
    """Return how many samples of the epoch all ranks together have read before a micro-batch, at a window's start."""
    position = feed.reached(number).position
    if isinstance(position, list):  # a stream: for each attempt, what each worker of each rank has taken
        return sum(taken for *_, by_rank in position for by_worker in by_rank for taken in by_worker)
    return position or 0


def _mean(losses: Sequence[tuple[Tensor, float | Tensor]]) -> float:
    """Return the mean loss of a window, from its losses and their factors."""
    total = sum(float(loss) * float(factor) for loss, factor in losses)
    by_user = any(isinstance(factor, Tensor) for _, factor in losses)
    return total / sum(float(factor) for _, factor in losses) if by_user else total
