"""The errors of a call that failed on some rank, with the first cause in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


class RankFailure(RuntimeError):
    """A call that failed on a rank: raised where the call was made.

    The exception of the first rank to fail, where it can be pickled, is its ``__cause__``.
    """

    def __init__(self, message: str, rank: int, stack: str) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""
        self.stack = stack
        """Its traceback, or the stacks of all its threads if it hung; empty if it died."""


class RankTimeout(RankFailure, TimeoutError):
    """A call that did not come back in time on some ranks; the message has their stacks."""


def rank_failure(
    fn: Callable[..., Any],
    world: int,
    first: int,
    said: Mapping[int, str],
    stack: str,
    late: Mapping[int, str],
) -> RankFailure:
    """The first cause in full, then a line for each of the others.

    Args:
        fn: what was called.
        world: on how many ranks.
        first: the rank that failed first.
        said: by rank, what went wrong there.
        stack: the first rank's traceback; empty if it has none.
        late: by rank, the stacks of those that never came back.
    """
    lines = [f"{name_of(fn)} failed on rank {first} of {world}: {said[first]}"]
    lines += [f"-- rank {first}:\n{stack.rstrip()}"] if stack else []
    others = sorted(set(said) - {first})
    lines += [f"-- rank {rank}, later: {said[rank].splitlines()[0]}" for rank in others]
    lines += [f"-- rank {rank} did not come back; it was in:\n{late[rank]}" for rank in sorted(late)]
    return RankFailure("\n".join(lines), first, stack)


def rank_timeout(fn: Callable[..., Any], world: int, seconds: float, late: Mapping[int, str]) -> RankTimeout:
    """Nobody failed, but the ranks in ``late`` (with their stacks) did not come back."""
    names = ", ".join(map(str, late))
    lines = [f"{name_of(fn)} on {world} ranks: no answer after {seconds:g} s from rank {names}"]
    lines += [f"-- rank {rank} was in:\n{stack}" for rank, stack in late.items()]
    return RankTimeout("\n".join(lines), min(late), late[min(late)])


def name_of(fn: Callable[..., Any]) -> str:
    """What a call is called in a message."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", fn))
