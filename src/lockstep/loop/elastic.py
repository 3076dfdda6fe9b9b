"""How a fit goes on with another number of ranks: read from checkpoints, kept in them, and told to the user."""

from __future__ import annotations

from typing import Any

from lockstep.config.run import RunConfig
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.loop.batch_counting import Accumulation, BatchCounting, Given, Plan, ResumePoint, count_batches
from lockstep.loop.feed import Feed
from lockstep.loop.progress import EPOCH_START, Progress


class Elastic:
    """By what one Trainer's fits count their batches.

    Attributes:
        saved: the plan of the checkpoint that the fit goes on from, until training goes on.
    """

    def __init__(self) -> None:
        self.saved: Plan | None = None
        self._ranks: int | None = None  # those of the plan, once it is settled
        self._flag: Accumulation = 1  # as it is given to the fit, whatever callbacks make of it later

    @property
    def planned(self) -> int | None:
        """The number of ranks of the plan, where it is known."""
        return self._ranks if self.saved is None else self.saved.ranks

    def read(self, own: dict[str, Any], ranks: int) -> None:
        """Take in lockstep's part of a checkpoint that a fit on so many ranks is to go on from."""
        self._ranks = None
        if own.get("plan") is not None:
            self.saved = Plan.load(own["plan"])
        elif len(own.get("ranks", ())) not in (0, ranks) and own["progress"]["batch"]:
            raise MisconfigurationException(
                "trainer.fit(ckpt_path=...): this checkpoint is of an earlier version of lockstep, from the middle of "
                f"an epoch, and does not tell how its data were cut: resume with {len(own['ranks'])} ranks."
            )

    def counting(
        self, config: RunConfig, automatic: bool, ranks: int, batches: list[int], flexible: bool
    ) -> BatchCounting:
        """How the fit counts.

        Args:
            config: of the fit.
            automatic: whether optimization is.
            ranks: that see samples of their own.
            batches: the ``batch_size`` of its loaders.
            flexible: whether these can be cut into windows of any size.
        """
        if self.saved is None:
            return BatchCounting(self._ranks or ranks, ranks)
        given = Given(ranks, config.accumulate_grad_batches, batches, flexible, automatic, config.keep_global_batch)
        return count_batches(self.saved, given)

    def prepare(self, feed: Feed, config: RunConfig, epoch: int) -> None:
        """Have a new feed know the epoch that it goes on in, before that is begun."""
        epoch = epoch if self.saved is None else self.saved.at.epoch
        feed.prepare(epoch, config.accumulation(epoch))

    def settle(
        self, config: RunConfig, feed: Feed, progress: Progress, resumed: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The loaders are there and training is about to begin: go on by the counting that they allow.

        Args:
            config: of the fit.
            feed: its loaders.
            progress: its counters, which are moved to the same place in this rank's count.
            resumed: this rank's part of the checkpoint.

        Returns:
            what of that part still holds.
        """
        saved, self.saved = self.saved, None
        found = feed.counting
        self._ranks, self._flag = found.ranks, config.accumulate_grad_batches
        if saved is None or resumed is None or not found.moved:
            return resumed
        (rank_zero_warn if found.differs else rank_zero_info)(found.said)
        if config.order == "torch" and saved.at.rows and 1 in (saved.ranks, found.ranks) != (1, 1):
            rank_zero_warn(
                'Trainer(order="torch"): one process draws another permutation than several, so that of what is left '
                "of this epoch some samples come twice and some never."
            )
        inside = progress.batch > saved.at.number and not progress.last
        number = None if found.resumed_at is None else found.resumed_at.number
        progress.reshare(saved.at.number, number)
        # not the gradients of a window, nor what it has logged
        carried = {"data", "random"} | (set() if inside else {"results", "metrics"})
        return {key: value for key, value in resumed.items() if key in carried}

    def state_dict(self, feed: Feed | None, progress: Progress, begun: int) -> dict[str, Any] | None:
        """For a checkpoint: the plan, and how far it has come.

        Args:
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
        return Plan(found.ranks, self._flag, feed.batches, found.size, at, before).state_dict()
