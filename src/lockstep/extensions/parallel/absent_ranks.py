"""Which rank was not there where a collective has failed, and what it has reported of itself."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import torch.distributed as dist

from lockstep.ground import comm

PATIENCE = 3.0
"""Seconds in which ranks that failed in the same collective report; they fail within moments of each other."""

LOST = re.compile("gloo|nccl|connection|timed? ?out|left|gone", re.IGNORECASE)
"""What a failed collective says, unlike an error of this rank's own."""
QUOTED = re.compile("'[^']*'")
"""Names in an error: a parameter may be called left."""


@contextlib.contextmanager
def named_failure(group: comm.Group, doing: str, number: int) -> Iterator[None]:
    """Where a collective fails in this block, say which rank was not there, and what it has said of itself.

    Args:
        group: the ranks of the collective.
        doing: what it is for; with ``number`` alike on every rank, and used once.
        number: of the round that comes, or is under way.
    """
    try:
        yield
    except Exception as error:
        lost = isinstance(error, dist.DistError) or LOST.search(QUOTED.sub("", str(error)))
        if not (lost and isinstance(error, RuntimeError)):
            report_failure(group, number, error)
            raise
        absent = describe_absent(group, f"{doing} of round {number}", number)
        raise RuntimeError(f"rank {comm.rank(group)}, {doing} of round {number}: {absent}") from error


def report_failure(group: comm.Group, number: int, error: Exception) -> None:
    """Before this rank, perhaps alone, raises ``error``: for the ranks that will miss it in round ``number``."""
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_key(group, number)}{comm.rank(group)}", f"{type(error).__name__}: {error}")


def _key(group: comm.Group, moment: object) -> str:
    return f"lockstep/failed/{getattr(group or dist.group.WORLD, 'group_name', '')}/{moment}/"


def describe_absent(group: comm.Group, moment: str, number: int) -> str:
    """After a collective has failed here: the ranks of ``group`` that do not report the same, in a sentence.

    Args:
        group: the ranks of the collective.
        moment: which one it was; alike on every rank, and used once.
        number: of its round.
    """
    mine = comm.rank(group)
    try:
        store = dist.distributed_c10d._get_default_store()
        here, words = _key(group, moment), _key(group, number)
        store.set(f"{here}{mine}", "1")
        absent = [rank for rank in range(comm.world_size(group)) if rank != mine]
        said: dict[int, str] = {}
        until = time.monotonic() + PATIENCE
        while len(said) < len(absent) and time.monotonic() < until:
            absent = [rank for rank in absent if not store.check([f"{here}{rank}"])]
            for rank in absent:
                if rank not in said and store.check([f"{words}{rank}"]):
                    said[rank] = store.get(f"{words}{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:  # DistError and its kind are
        return "the ranks' common store does not answer: the process that keeps it, that of rank 0, has ended"
    if not absent:
        return "all ranks were there: the connection between them failed"
    for rank in absent:
        if rank in said:
            return f"rank {rank} was not there: it raised {said[rank]}"
    who = f"rank {absent[0]} was" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} were"
    return (
        f"{who} not there: gone, failed, or elsewhere in its program (a loss that depends on no output of the model, a "
        "batch more or less than on the other ranks: see skip_backward() and join())"
    )
