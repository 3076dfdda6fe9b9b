"""Error messages that name the ranks that were missing in a failed collective."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import torch.distributed as dist

from lockstep.ground import comm

PATIENCE = 3.0
"""Seconds to wait for the reports of ranks whose collective failed as well; they fail at almost the same time."""

LOST = re.compile("gloo|nccl|connection|timed? ?out|left|gone", re.IGNORECASE)
"""Words in the error of a failed collective that do not occur in an error which this rank itself caused."""
QUOTED = re.compile("'[^']*'")
"""Quoted names in an error, which are ignored because a parameter may be called "left"."""


@contextlib.contextmanager
def named_failure(group: comm.Group, doing: str, number: int) -> Iterator[None]:
    """If a collective inside the block fails, raise an error that names the missing ranks and their own errors.

    Args:
        group: process group of the collective.
        doing: purpose of the collective. With ``number`` it is used once, and is the same on all ranks.
        number: number of the current or next round.
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
    """Before this rank raises ``error``, publish it to the ranks that wait for this rank in round ``number``."""
    # without a store, or with one whose process has ended, the error itself is still raised
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_key(group, number)}{comm.rank(group)}", f"{type(error).__name__}: {error}")


def _key(group: comm.Group, moment: object) -> str:
    return f"lockstep/failed/{getattr(group or dist.group.WORLD, 'group_name', '')}/{moment}/"


def describe_absent(group: comm.Group, moment: str, number: int) -> str:
    """After a failed collective, return a text about the ranks of ``group`` that did not report this failure.

    Args:
        group: process group of the collective.
        moment: name of the collective; used once, and the same on all ranks.
        number: number of the collective's round.
    """
    mine = comm.rank(group)
    try:
        store = dist.distributed_c10d._get_default_store()
        here, failed = _key(group, moment), _key(group, number)
        store.set(f"{here}{mine}", "1")
        absent = [rank for rank in range(comm.world_size(group)) if rank != mine]
        errors: dict[int, str] = {}
        until = time.monotonic() + PATIENCE
        while len(errors) < len(absent) and time.monotonic() < until:
            absent = [rank for rank in absent if not store.check([f"{here}{rank}"])]
            for rank in absent:
                if rank not in errors and store.check([f"{failed}{rank}"]):
                    errors[rank] = store.get(f"{failed}{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:  # the base of DistError
        return "the ranks' store does not reply, because rank 0's process, which serves the store, has ended"
    if not absent:
        return "no rank is missing: the connection between the ranks failed"
    for rank in absent:
        if rank in errors:
            return f"rank {rank} is missing: it raised {errors[rank]}"
    who = f"rank {absent[0]} is" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} are"
    return (
        f"{who} missing: the process has ended or failed, its loss depends on no output of the model (call "
        "skip_backward()), or it has a different number of batches (use join())"
    )
