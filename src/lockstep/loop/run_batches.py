"""How the fits of a Trainer go on counting batches where a checkpoint's run left off, with other ranks perhaps."""

from __future__ import annotations

from typing import Any

from lockstep.config.run import RunConfig, accumulation, set_flag
from lockstep.data.counting import Accumulation, BatchCounting, BatchPlan, ResumePoint, RunAttempt, count_batches
from lockstep.data.feed import Feed
from lockstep.loop.changed_loaders import warn_within_epoch
from lockstep.loop.progress import EPOCH_START, Progress
from lockstep.loop.saved_ranks import at_window_start


class RunBatches:
    """By what one Trainer's fits count their batches.

    Attributes:
        saved: the plan of the checkpoint that the fit goes on from, until training goes on.
    """

    def __init__(self) -> None:
        self.saved: BatchPlan | None = None
        self._ranks: int | None = None  # those of the plan, once it is settled
        self._flag: Accumulation = 1  # as it is given to the fit, whatever callbacks make of it later
        self._by_hooks: Accumulation | None = None  # what those of a checkpoint's run had made of it

    @property
    def planned(self) -> int | None:
        """The number of ranks of the plan, where it is known."""
        return self._ranks if self.saved is None else self.saved.ranks

    def read(self, own: dict[str, Any]) -> None:
        """Take in lockstep's part of a checkpoint that a fit is to go on from."""
        self._ranks = self._by_hooks = None
        if own.get("plan") is not None:
            self.saved = BatchPlan.load(own["plan"])
            by_hooks = own["plan"].get("by hooks")
            self._by_hooks = None if by_hooks is None else accumulation("accumulate_grad_batches", by_hooks)

    def counting(
        self,
        config: RunConfig,
        automatic: bool,
        ranks: int,
        batches: list[int],
        flexible: bool,
        workers: int | None = None,
    ) -> BatchCounting:
        """How the fit counts.

        Args:
            config: of the fit.
            automatic: whether optimization is.
            ranks: that see samples of their own.
            batches: the ``batch_size`` of its loaders.
            flexible: whether these can be cut into windows of any size.
            workers: that read a stream.
        """
        if self.saved is None:
            return BatchCounting(self._ranks or ranks, ranks)
        attempt = RunAttempt(
            ranks, config.accumulate_grad_batches, batches, flexible, automatic, config.keep_global_batch, workers
        )
        return count_batches(self.saved, attempt)

    def prepare(self, feed: Feed, config: RunConfig, epoch: int) -> None:
        """Have a new feed know the epoch that it goes on in, before that is begun."""
        epoch = epoch if self.saved is None else self.saved.at.epoch
        feed.prepare(epoch, config.accumulation(epoch))

    def settle(
        self,
        config: RunConfig,
        feed: Feed,
        progress: Progress,
        resumed: dict[str, Any] | None,
        holds: bool = True,
    ) -> dict[str, Any] | None:
        """The loaders are there and training is about to begin: go on by the counting that they allow.

        Args:
            config: of the fit.
            feed: its loaders.
            progress: its counters, which are moved to the same place in this rank's count.
            resumed: this rank's part of the checkpoint.
            holds: whether gradients of a window under way can be taken over, by its engine and optimizers.

        Returns:
            what of that part still holds.
        """
        saved, self.saved = self.saved, None
        found = feed.counting
        self._ranks, self._flag = found.ranks, config.accumulate_grad_batches
        if saved is not None and saved.accumulate != self._flag:
            self._by_hooks = None  # the user has set the flag anew
        if saved is None or resumed is None:
            return resumed
        warn_within_epoch(config, saved, feed, progress)
        found.tell()
        inside = progress.batch > saved.at.number and not progress.last
        again = inside and (found.moved or not holds)
        if not (found.moved or again):
            return resumed
        number = found.resumed_number if found.moved else saved.at.number or None
        progress.reshare(saved.at.number, number)
        row_before, row_now = saved.ranks * max(saved.batches, default=1), found.ranks * max(feed.batches, default=1)
        progress.validated = progress.validated * row_before // row_now
        return at_window_start(resumed, number is None) if again else resumed

    def as_hooks_left_it(self, config: RunConfig) -> RunConfig:
        """The config of a fit that goes on, with the accumulation that hooks had set which do not run again."""
        by_hooks, self._by_hooks = self._by_hooks, None
        return config if by_hooks is None else set_flag(config, "accumulate_grad_batches", by_hooks)

    def state_dict(self, config: RunConfig, feed: Feed | None, progress: Progress, begun: int) -> dict[str, Any] | None:
        """For a checkpoint: the plan, and how far it has come.

        Args:
            config: of the fit, as hooks have left it.
            feed: the training loaders; None before they are asked for.
            progress: the fit's.
            begun: batches of a window under way.
        """
        if feed is None:
            return None
        found, at = feed.counting, ResumePoint(progress.epoch, 0, 0)
        if progress.phase != EPOCH_START:
            at = feed.reached(progress.batch - begun)
        point = found.resumed_at
        before = point if point is not None and point.epoch == progress.epoch else None
        plan = BatchPlan(
            found.ranks, self._flag, feed.batches, found.size, at, before, feed.by_process, feed.orders
        ).state_dict()
        newest = config.accumulate_grad_batches
        return plan if newest == self._flag else {**plan, "by hooks": newest}
