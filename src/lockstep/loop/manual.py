"""A batch of manual optimization: ``training_step`` does it all, the update too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from lockstep.data.weighing import Share
from lockstep.data.window import Window
from lockstep.engines.engine import BatchByHand
from lockstep.loop.micro_batches import MicroBatches
from lockstep.loop.padding import padding
from lockstep.loop.session import Session
from lockstep.loop.step_output import shown_by_hand, tell_of_uneven
from lockstep.loop.update import Update


class Manual:
    """Plays windows of one batch.

    ``training_step`` makes the update, so it runs on every rank: on a padding batch where a rank has no samples, which
    leaves no trace (`loop/padding.py`).
    """

    at_once = 1

    def __init__(self, session: Session, batches: MicroBatches, update: Update) -> None:
        self._session = session
        self._strategy = session.strategy
        self._shared = session.world_size > 1
        self._batches, self._update = batches, update

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Play one window, yielding when the hooks of its batch have run."""
        strategy, batches = self._strategy, self._batches
        for micro_batch in batches.begun(window, batch_idx):
            batch, weight, share = micro_batch.batch, micro_batch.weight, micro_batch.share
            if self._shared:
                batches.publish()
            self._update.watch.forget_depth()
            rounds = strategy.rounds
            self._update.share = share if weight else 1.0
            strategy.by_hand = BatchByHand(micro_batch.number, share)
            if type(share) is Share:
                tell_of_uneven()
            with padding(self._session) if weight == 0.0 else nullcontext():
                skips = batch is None and not self._shared
                output = None if skips else strategy.run(batches.training_step, *batches.arguments(micro_batch))
            strategy.by_hand = None
            shown = shown_by_hand(output)
            if self._shared:
                self._session.agreement.settle(strategy.rounds != rounds)
            batches.end(None if batch is None else shown, micro_batch)
            yield
