"""Says what differs between ranks and one process by nature, and was switched off or handed over."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.extensions.verify import mixed_precision
from lockstep.extensions.verify.recordings import Recording

_OF_RANKS = {
    "dropout": "dropout was off: ranks drop other elements than one process does",
    mixed_precision.NOTE: "{name} was off: it rounds parameters or gradients to a smaller type",
    "comm hook": "the communication hook {name} was off: it rounds gradients, or keeps parts back",
}
KEPT = ("own draw", "rank 0's draw")
"""What one process notes where it keeps its own random numbers, or takes rank 0's alone."""
_OF_ONE = {
    "batch norm": "BatchNorm is not synchronized: one process was made to count over each rank's samples, as ranks do",
    **dict.fromkeys(KEPT, "random numbers of {where} could not be handed to one process"),
}


def notes_of(ranks: Recording, whole: Recording) -> Iterator[str]:
    """What the two runs have noted of it."""
    for run, texts in ((ranks, _OF_RANKS), (whole, _OF_ONE)):
        for _, event in run.of(*texts):
            yield texts[event["kind"]].format(**event)
    if ranks.has("draw"):
        yield "random numbers of a step: one process was given those of the ranks"
