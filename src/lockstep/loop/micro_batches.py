"""The micro-batches of a fit: how each begins and ends, on ranks that have samples of it and on those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lockstep.data.window import Window
from lockstep.ground.rank import warn_once
from lockstep.loop.hooks import Transfer
from lockstep.loop.padding import padding
from lockstep.loop.progress import BATCH_END
from lockstep.loop.session import Session
from lockstep.loop.signatures import takes_idx
from lockstep.loop.step_output import has_uneven_targets
from lockstep.loop.update import Update

BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_backward")
SKIPPED = (
    "The data set does not go round: ranks {ranks} have no samples of a micro-batch that is left at the end, and run "
    "neither `training_step` nor the batch hooks for it: {names}. What belongs to each update (an average of the "
    "weights, say) belongs into a hook of the update, `on_before_zero_grad` or `on_before_optimizer_step`, which run "
    "on every rank; or leave such batches out by DataLoader(drop_last=True)."
)
NO_BATCH = (
    "A training loader gave None for a batch: it is skipped, and so are on_train_batch_start and `training_step`. If "
    "that is not meant, look at the loader's `collate_fn`."
)


class Begun(NamedTuple):
    """A micro-batch that is on the device, and whose ``on_train_batch_start`` has run."""

    batch: Any
    number: int
    """``batch_idx``"""
    weight: float
    """Samples of this rank."""
    share: float
    """What its loss is multiplied with."""
    absent: tuple[int, ...]
    """Ranks without samples of it."""
    first: bool
    """The first of its window."""
    last: bool
    """The last of its window."""


class MicroBatches:
    """Begins and ends the micro-batches of a fit.

    A micro-batch of which this rank has no samples does not exist for the user's code here: its batch hooks and
    ``training_step`` do not run. What belongs to the update runs on every rank.

    Attributes:
        training_step: the module's. Who measures it puts a timed one in its place.
        takes_idx: whether that takes the number of the batch.
        transfer: brings a batch to the device.
        moves: whether there is anything to do for it.
        absent: ranks without samples of the micro-batch at hand.
        ended_by_user: ``on_train_batch_start`` has returned -1.
        newest: the number in its epoch of the micro-batch that was begun last; -1 before the first.
    """

    newest = -1
    training_step: Callable[..., Any]
    takes_idx: bool
    _given: Callable[..., Any] | None = None  # the module's, when it was looked at last

    def __init__(self, session: Session, update: Update) -> None:
        self._session = session
        self._strategy = session.strategy
        self._shared = session.world_size > 1
        self._hooks = session.hooks
        self._results = session.results
        self._progress = session.fit.progress
        self._update = update
        self.take_step()
        self.transfer = Transfer(session.module, session.datamodule, session.strategy)
        self.moves = not self.transfer.idle
        self.absent: tuple[int, ...] = ()
        self.ended_by_user = False
        self._results.enter("training_step")
        self._table = self._results.table

    def take_step(self) -> None:
        """Take the module's ``training_step``, which a hook may have replaced since the last epoch."""
        given = self._session.module.training_step
        if given != self._given:
            self._given = self.training_step = given
            self.takes_idx = takes_idx(given)

    def begun(self, window: Window, batch_idx: int) -> Iterator[Begun]:
        """Begin one micro-batch after the other; none behind the one for which the user has ended the epoch."""
        strategy, progress, last, absent = self._strategy, self._progress, window.size - 1, window.absent
        local = strategy.copies.local_steps
        if last and not window.begun:
            self._session.fit.window_start.note(batch_idx)
        if local is not None:
            window.share_among(local.averaged_ranks())
        if window.gap is not None:
            strategy.check_gap(*window.gap)
        self._results.among_batches = True
        for i, (batch, weight, share) in enumerate(window):
            strategy.sync_gradients = at_end = i == last
            progress.last = at_end and window.last
            progress.under_way = True
            if absent is not None:
                self.absent = strategy.replicas.ranks(absent[i])
            if self.newest == -1:  # the first of a fit, before it is on a device
                self._session.fit.uneven_targets = (self._shared or last > 0) and has_uneven_targets(batch)
            batch = self.begin(batch, batch_idx + i, weight)
            if self.ended_by_user:
                progress.under_way = False
                return
            progress.runs = True
            if strategy.optimizers != self._update.optimizers:
                self._update.change_optimizers()
            first = i == 0 and not window.begun
            yield Begun(batch, batch_idx + i, weight, share, self.absent, first, at_end)

    def begin(self, batch: object, batch_idx: int, weight: float) -> Any:
        """Bring a batch to the device and call the hooks of its begin; gives it as it is there."""
        results = self._results
        self.newest = batch_idx
        results.micro_batch += 1
        results.weight = weight
        results.muted = weight == 0.0
        if self.absent:
            return self._begin_with_absent(batch, batch_idx, weight)
        if self.moves:
            batch = self.transfer(batch)
        if batch is None:
            warn_once(NO_BATCH, key="no batch")
        elif self._hooks.on_train_batch_start is not None:
            self.ended_by_user = self._hooks.call("on_train_batch_start", batch, batch_idx) == -1
        results.table = self._table
        return batch

    def _begin_with_absent(self, batch: object, batch_idx: int, weight: float) -> Any:
        """:meth:`begin` where some ranks have no samples of the micro-batch: all learn whether the epoch ends here."""
        names = self._hooks.owners(BATCH_HOOKS)
        if names:
            warn_once(SKIPPED.format(ranks=list(self.absent), names=", ".join(names)), key="batch hooks skipped")
        ended = False
        if weight == 0.0:
            self._hooks.call_without_samples("_on_any_batch_start", batch_idx)
            if self.moves and batch is not None:
                with padding(self._session):
                    batch = self.transfer(batch)
        else:
            with self.without_absent():
                if self.moves:
                    batch = self.transfer(batch)
                if self._hooks.on_train_batch_start is not None:
                    ended = self._hooks.call("on_train_batch_start", batch, batch_idx) == -1
        self.ended_by_user = self._strategy.reduce_boolean_decision(ended, all=False)
        if self.ended_by_user:
            self.absent = ()
        self._results.table = self._table
        return batch

    @contextmanager
    def without_absent(self) -> Iterator[None]:
        """Around user code that ranks without samples do not run: it may call no collective."""
        self._strategy.absent = self.absent
        try:
            yield
        finally:
            self._strategy.absent = ()

    def arguments(self, micro_batch: Begun) -> tuple[Any, ...]:
        """Of ``training_step``."""
        return (micro_batch.batch, micro_batch.number) if self.takes_idx else (micro_batch.batch,)

    def enter_step(self, muted: bool) -> None:
        """What is logged from here on is logged in ``training_step``; ``muted``: and counts for nothing."""
        self._results.table = self._table
        self._results.muted = muted

    def publish(self) -> None:
        """Before this rank's part of the reduction: what it wants the others to know at the window's end."""
        self._session.request_stop()
        self._session.agreement.publish()

    def end(self, outputs: object, micro_batch: Begun, done: int = 1) -> None:
        """Call the hooks of a micro-batch's end.

        Args:
            outputs: what they are shown of its step.
            micro_batch: that is over.
            done: micro-batches that count as finished from here on.
        """
        progress, results = self._progress, self._results
        progress.batch += done
        progress.total_batches += done
        progress.under_way = progress.runs = False
        progress.phase = BATCH_END
        if results.each_step:
            self._session.published.publish(results.agree_on_step())
        if self.absent:
            self._end_with_absent(outputs, micro_batch)
        elif self._hooks.on_train_batch_end is not None:
            self._hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
        results.muted = False
        if results.each_step and self._strategy.sync_gradients:
            self._session.agree_on_stop()  # who stops by a value of this window stops here

    def _end_with_absent(self, outputs: object, micro_batch: Begun) -> None:
        if micro_batch.weight == 0.0:
            self._hooks.call_without_samples("_on_any_batch_end", micro_batch.number)
        elif self._hooks.on_train_batch_end is not None:
            with self.without_absent():
                self._hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
        self.absent = ()
