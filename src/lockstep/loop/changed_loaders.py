"""What a fit that goes on in the middle of an epoch warns of, where its loaders are not those that it had."""

from __future__ import annotations

from lockstep.config.run import RunConfig
from lockstep.data.counting import BatchPlan
from lockstep.data.feed import Feed
from lockstep.ground.rank import rank_zero_warn
from lockstep.loop.progress import EPOCH_START, Progress


def _warn_of_other_order(saved: BatchPlan, feed: Feed) -> None:
    """Where an epoch in torch's order goes on: one process and several draw differently."""
    if saved.at.rows > 0 and saved.by_process not in (None, feed.by_process):
        rank_zero_warn(
            'Trainer(order="torch"): one process draws another permutation than several, so that of what is left '
            "of this epoch some samples come twice and some never."
        )


def warn_within_epoch(config: RunConfig, saved: BatchPlan, feed: Feed, progress: Progress) -> None:
    """Where a fit goes on in the middle of an epoch: warn of what keeps its samples from coming once each."""
    if progress.phase == EPOCH_START or progress.last or not progress.batch:
        return
    has_warned = _warn_of_changed_loaders(saved, feed)
    if config.order == "torch" and not has_warned:
        _warn_of_other_order(saved, feed)


def _warn_of_changed_loaders(saved: BatchPlan, feed: Feed) -> bool:
    """Where an epoch goes on, and the loaders do not give the samples in the order in which it was begun."""
    now, before = feed.orders, saved.orders
    if before is None:
        return False
    if len(now) != len(before):
        _warn_of_change("There are", f"{len(now)} training loaders, before {len(before)}")
        return True
    has_warned = False
    for number, (order, old) in enumerate(zip(now, before, strict=True)):
        if saved.workers is not None:  # the stream is read again, and its workers are told of
            old = old._replace(workers=order.workers)
        change = order.change(old)
        if change:
            name = f"train_dataloader[{number}]" if len(now) > 1 else "train_dataloader"
            _warn_of_change(f"The samples of {name} are", change)
            has_warned = True
    return has_warned


def _warn_of_change(what: str, change: str) -> None:
    rank_zero_warn(
        f"trainer.fit: the run goes on in the middle of an epoch. {what} {change}: of this epoch some samples may be "
        "seen twice and some never. Resume with the loaders that it had, or from a checkpoint of the end of an epoch."
    )
