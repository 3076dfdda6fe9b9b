"""Says whether samples that a sampler repeats are counted twice in what a script prints behind an evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.extensions.verify.compare import EVALUATION, Difference, Reason
from lockstep.extensions.verify.recordings import Recording
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.samples import Padding

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def counted_twice(
    ranks: Recording, whole: Recording, padded: Sequence[Padding], runs: Runs
) -> tuple[Difference, Reason] | None:
    """The difference where a printed number shows that samples of a loader come on several ranks."""
    once = runs.on_one(ranks, once=tuple(each.loader for each in padded))
    line = _printed_twice(ranks.first.printed, whole.first.printed, once.first.printed)
    if not line:
        return None
    step = len(ranks.first.steps)
    cause = (
        "DistributedSampler repeats samples to give all ranks as many, and they are counted twice in the metrics: "
        "leave them out, or evaluate on each rank samples[rank::world_size]"
    )
    text = f"{padded[0]}, and counts in {line!r}"
    return Difference(EVALUATION, step, step, str(padded[0].sample), text=text), Reason(cause, padded[0].where)


def _printed_twice(theirs: Sequence[str], own: Sequence[str], once: Sequence[str]) -> str:
    """A printed line with a number that ranks and one process share, and that is another one where each sample counts
    once; "" for none."""
    for lines in zip(theirs, own, once, strict=False):
        words = [_NUMBER.findall(line) for line in lines]
        if len({_NUMBER.sub("", line) for line in lines}) > 1:
            continue
        for mine, whole, right in zip(*words, strict=True):
            if mine == whole != right:
                return lines[0].strip()
    return ""
