"""One pass over the training batches that trains nothing, for what forwards alone leave behind in a module."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lockstep.loop.session import Session
from lockstep.loop.step import Step


def forwards(session: Session, step: Step) -> int:
    """Run ``training_step`` on the batches of the epoch to come, without hooks, gradients, logs and updates.

    To be called on all ranks inside a fit, between two epochs or after the last one, under automatic
    optimization. BatchNorm's statistics are an example of what changes.

    Returns:
        the number of batches that this rank had samples for.
    """
    feed, strategy, results = session.fit.loaded, session.strategy, session.results
    hook, table, muted = results.hook, results.table, results.muted
    results.enter("training_step")
    feed.begin(session.fit.progress.epoch, 0)
    number = drawn = 0
    for window in feed.windows(1):
        for batch, weight, _ in window:
            results.muted = True
            absent = () if window.absent is None else strategy.replicas.ranks(window.absent[0])
            with torch.no_grad(), strategy.leaving_out(absent) if absent else nullcontext():
                if weight:
                    batch = step.transfer(batch) if step.moves else batch
                    arguments = (batch, number) if step.takes_idx else (batch,)
                    strategy.run(step.training_step, *arguments)
            number += 1
            drawn += bool(weight)
    results.hook, results.table, results.muted = hook, table, muted
    return drawn
